"""A grid of 400 points, each of them measured: what the searches of `tuning.py` are replayed on.

    python benchmarks/tuning_grid.py                       # go on with the log, or begin; then write the grid
    slapo tune report benchmarks/tuning_grid.py            # while it runs, or afterwards
    python benchmarks/tuning_grid.py --cpu-time            # on a busy machine: processor time, by a log of its own

Four knobs of a small BERT on two processes: the batch of a replica, how many layers are recomputed, two replicas or
layers split over both processes, and which part of a layer is split. It is slapo-tune's own search,
by the sampler ``exhaustive`` and its log: killed at any time, it goes on where it was. Measured on a quiet machine the
grid takes about 20 minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForMaskedLM

import slapo_core as slapo
import slapo_tune
from slapo_tune.log import read_log
from slapo_tune.report import StudyReport
from slapo_tune.search import Finished, search
from slapo_tune.space import Space

RESULT = Path(__file__).parent / "results" / "tuning_grid.json"
LOG = Path("build", "tuning_grid", "grid.jsonl")

NAMES = ("tp", "split", "checkpoint", "batch")
RANKS = 2
STEPS = 3
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
    steps=STEPS,
)


def by_cpu_time(run: slapo_tune.Run) -> float:
    """Samples per second of processor time: on a busy machine, where a step takes as long as the others let it."""
    engine = slapo.build(run.schedule, target="torch", optimizer=torch.optim.AdamW)
    seconds = []
    for _ in range(2 + STEPS):
        before = time.process_time()
        engine.train_step(run.batch)
        seconds.append(time.process_time() - before)
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, seconds[2:])
    run.measured["time"] = statistics.median(max(step) for step in zip(*every, strict=True))
    return float(run.point["batch"] * mesh(run.point)["dp"] / run.measured["time"])


def write(log: Path, clock: str, result: Path) -> None:
    """The grid of a log: every trial, the symbols, and what it was measured on."""
    trials = [dataclasses.asdict(trial) for trial in read_log(log).trials]
    points = [trial["point"] for trial in trials]
    record = {
        "about": "every point of benchmarks/tuning_grid.py, measured by slapo tune with the sampler exhaustive",
        "clock": clock,
        "value": "samples per second of both ranks",
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "symbols": {name: list(dict.fromkeys(p[name] for p in points if name in p)) for name in NAMES},
        "trials": trials,
    }
    head = json.dumps({**record, "trials": []}, indent=1)
    lines = ",\n  ".join(json.dumps(rounded(trial)) for trial in trials)
    part = result.with_suffix(".part")
    part.write_text(head.replace('"trials": []', f'"trials": [\n  {lines}\n ]') + "\n")
    part.replace(result)
    print(f"{len(trials)} points, {sum(trial['status'] == 'ok' for trial in trials)} of them ok: wrote {result}")


def rounded(value: Any) -> Any:
    """Five digits of what was measured: more of them are noise."""
    if isinstance(value, dict):
        return {key: item if key == "point" else rounded(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-time", action="store_true", help="measure processor time: on a machine that is busy")
    parser.add_argument("--trials", type=int, help="measure at most so many (default: all)")
    parser.add_argument("--log", type=Path, help=f"default: {LOG}, or beside it with --cpu-time")
    parser.add_argument("--out", type=Path, default=RESULT, help="default: %(default)s")
    return parser


def main(options: argparse.Namespace) -> int:
    changes: dict[str, Any] = {"evaluate": by_cpu_time} if options.cpu_time else {}
    log = options.log or (LOG.with_name("grid_cpu_time.jsonl") if options.cpu_time else LOG)
    log.parent.mkdir(parents=True, exist_ok=True)
    chosen = dataclasses.replace(study, log=log, trials=options.trials, verify=False, **changes)
    result = search(chosen, tell=tell)
    print(StudyReport(list(Space(space).points()), result.trials).summary())
    write(log, "processor time of the slower rank" if options.cpu_time else "time of the slower rank", options.out)
    return 0


def tell(event: Any) -> None:
    if isinstance(event, Finished):
        trial = event.trial
        value = f"{trial.value:.1f}" if trial.value is not None else trial.reason
        print(f"{trial.number + 1:3} of 400  {trial.status}  {value}  {dict(trial.point)}", flush=True)


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
