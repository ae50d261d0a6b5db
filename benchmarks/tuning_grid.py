"""A grid of 400 points, each of them measured: what the searches of `tuning.py` are replayed on.

    python benchmarks/tuning_grid.py                       # go on with the log, or begin; then write the grid
    slapo tune report benchmarks/tuning_grid.py            # while it runs, or afterwards
    python benchmarks/tuning_grid.py --predict-only        # only the predictions, which do not depend on the machine

Four knobs of a small BERT on two processes: the batch of a replica, how many layers are recomputed, two replicas or
layers split over both processes, and which part of a layer is split. It is slapo-tune's own search,
by the sampler ``exhaustive`` and its log: killed at any time, it goes on where it was. Measured on a quiet machine the
grid takes about a quarter of an hour.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM

import slapo_core as slapo
import slapo_tune

RESULT = Path(__file__).parent / "results" / "tuning_grid.json"
LOG = Path("build", "tuning_grid", "grid.jsonl")

RANKS = 2
LAYERS = 4
LENGTH = 48
VOCABULARY = 512
BATCHES = tuple(range(2, 41, 2))
RATIOS = tuple(layers / LAYERS for layers in range(LAYERS + 1))


def make_model() -> BertForMaskedLM:
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def space(s: Any) -> None:
    """100 points of two replicas, and 100 for each way to split the layers."""
    if s.choose("tp", (1, 2)) > 1:
        s.choose("split", ("attention", "mlp", "both"))
    s.choose("checkpoint", RATIOS)
    s.choose("batch", BATCHES)


def schedule(sch: slapo.Schedule, p: Any) -> None:
    for layer in sch["bert.encoder.layer.*"]:
        if p.get("split") in ("attention", "both"):
            for name in ("query", "key", "value"):
                layer[f"attention.self.{name}"].shard(["weight", "bias"], axis=0)
            layer["attention.self"].shard_attribute(["num_attention_heads", "all_head_size"])
            layer["attention.self"].sync("bwd_post", "all_reduce")
            layer["attention.output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        if p.get("split") in ("mlp", "both"):
            layer["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
            layer["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    for layer in range(round(p["checkpoint"] * LAYERS)):
        sch[f"bert.encoder.layer.{layer}"].checkpoint()


def mesh(p: Any) -> dict[str, int]:
    return {"dp": RANKS // p["tp"], "tp": p["tp"]}


def batch(p: Any) -> dict[str, torch.Tensor]:
    """One replica's: random tokens, of which one in seven is predicted."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (p["batch"], LENGTH), generator=generator)
    chosen = torch.rand(ids.shape, generator=generator) < 1 / 7
    return {"input_ids": ids, "labels": ids.masked_fill(~chosen, -100)}


study = slapo_tune.Study(
    make_model,
    space,
    schedule,
    world_size=RANKS,
    mesh=mesh,
    batch=batch,
    optimizer=torch.optim.AdamW,
    sampler="exhaustive",
    log=LOG,
    timeout=120,
    warmup=2,
    steps=3,
)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--loaded", action="store_true", help="the machine is busy with other things: say so in the file"
    )
    parser.add_argument(
        "--predict-only", action="store_true", help="measure nothing; predict what has no prediction yet"
    )
    parser.add_argument("--trials", type=int, help="measure at most so many (default: all)")
    return parser


def trial(record: Trial, predicted: dict[str, float]) -> dict[str, Any]:
    return {**dataclasses.asdict(record), "predicted": {**record.predicted, **predicted}}


def predict(point: Any) -> dict[str, float]:
    """Bytes and, of a rank that has the processor to itself, seconds."""
    ...
