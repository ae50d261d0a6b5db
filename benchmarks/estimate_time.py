"""Do predicted step times order schedules as measured ones do? Models x batches x lengths x checkpoint ratios on a CPU.

The device is measured first, as ``slapo device measure`` does. Points of one process are measured in CPU time, those of
two tensor-parallel ranks (gloo) by the clock: run it on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from report import save
from torch import nn

import slapo_core as slapo
from slapo_estimate.device_benchmark import measure_device
from slapo_testing import preload_modules, run_ranks

LAYERS, HIDDEN, HEADS, WORDS = 4, 256, 4, 2000
ALLOWED = 0.9


@dataclass(frozen=True)
class Point:
    """One schedule on one batch.

    Args:
        model: ``"bert"``, ``"gpt2"`` or ``"llama"``.
        batch: sequences.
        length: tokens of each.
        checkpointed: layers.
        tp: ranks.
    """

    model: str
    batch: int
    length: int
    checkpointed: int
    tp: int = 1

    @property
    def mesh(self) -> dict[str, int] | None:
        return {"tp": self.tp} if self.tp > 1 else None

    def inputs(self) -> dict[str, torch.Tensor]:
        ids = torch.arange(self.batch * self.length).reshape(self.batch, self.length) % WORDS
        return {"input_ids": ids, "labels": ids}


def make_model(name: str) -> nn.Module:
    import transformers

    sizes = {"vocab_size": WORDS, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    if name == "bert":
        config = transformers.BertConfig(**sizes, intermediate_size=4 * HIDDEN, attn_implementation="sdpa")
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        return transformers.BertForMaskedLM(config)
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=WORDS, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, use_cache=False, attn_pdrop=0.0,
                resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=1, eos_token_id=2,
            )
        )  # fmt: skip
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, intermediate_size=3 * HIDDEN, use_cache=False, tie_word_embeddings=False)
    )


def apply(sch: slapo.Schedule, point: Point) -> None:
    layers = {"bert": "bert.encoder.layer.*", "gpt2": "transformer.h.*", "llama": "model.layers.*"}[point.model]
    for layer in sch[layers] if point.tp > 1 else ():
        for projection in ("query", "key", "value"):
            layer[f"attention.self.{projection}"].shard(["weight", "bias"], axis=0)
        layer["attention.self"].shard_attribute(["num_attention_heads", "all_head_size"])
        layer["attention.self"].sync("bwd_post", "all_reduce")
        layer["attention.output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        layer["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        layer["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    for layer in list(sch[layers])[: point.checkpointed]:
        layer.checkpoint()


adamw = functools.partial(torch.optim.AdamW, lr=1e-4)


def predicted(point: Point, device: slapo.DeviceSpec) -> float:
    found = slapo.estimate_functions(
        functools.partial(make_model, point.model),
        apply,
        point.inputs(),
        arguments=(point,),
        mesh=point.mesh,
        rank=0,
        optimizer=adamw,
        device=device,
    )
    assert found.time is not None
    return found.time


def measured(points: Sequence[Point], rounds: int) -> list[float]:
    """Seconds of a step at each point, the median of rounds over all points; each round begins elsewhere."""
    torch.set_num_threads(1)
    engines: dict[tuple[str, int], Any] = {}  # one for all batches
    for point in points:
        if (point.model, point.checkpointed) not in engines:
            sch = slapo.create_schedule(make_model(point.model), mesh=point.mesh)
            apply(sch, point)
            engines[point.model, point.checkpointed] = slapo.build(sch, optimizer=adamw)
    clock = time.process_time if points[0].tp == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in points]
    for number in range(rounds + 1):
        for place in range(len(points)):
            at = (place + number * 7) % len(points)
            point = points[at]
            engine, batch = engines[point.model, point.checkpointed], point.inputs()
            if point.tp > 1:
                dist.barrier()
            begin = clock()
            engine.train_step(batch)
            if number:  # the first round warms up
                times[at].append(clock() - begin)
    return [statistics.median(each) for each in times]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: that of the places in the order, equal values sharing theirs."""

    def places(values: Sequence[float]) -> list[float]:
        return [
            statistics.fmean([sum(other < value for other in values), sum(other <= value for other in values) - 1])
            for value in values
        ]

    return statistics.correlation(places(first), places(second))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measured steps a point (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="a few points only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    preload_modules(*(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama")))
    batches, lengths = ((1, 4), (32, 128)) if options.small else ((1, 2, 4, 8), (32, 128))
    ratios = (0, LAYERS) if options.small else (0, LAYERS // 2, LAYERS)
    alone = [Point(*each) for each in itertools.product(("bert", "gpt2", "llama"), batches, lengths, ratios)]
    split = [Point("bert", *each, tp=2) for each in itertools.product(batches, lengths, (0, LAYERS))]
    device = measure_device(ranks=2, dtypes=("float32",), tell=lambda text: print(f"measuring {text}", flush=True))
    print(device)
    rows: list[dict[str, Any]] = []
    for what, points in (("one process", alone), ("two tensor-parallel ranks", split)):
        seconds = run_ranks(measured, points, options.rounds, world_size=points[0].tp, timeout=3000)[0]
        guesses = [predicted(point, device) for point in points]
        factor = statistics.median(guess / second for guess, second in zip(guesses, seconds, strict=True))
        correlation = rank_correlation(guesses, seconds)
        print(f"{what}: {len(points)} points, rank correlation {correlation:.3f} (allowed {ALLOWED}); "
              f"predicted / measured: median {factor:.2f}")  # fmt: skip
        for point, guess, second in zip(points, guesses, seconds, strict=True):
            print(f"  {point.model:<6} {point.batch:>2} x {point.length:<4} {point.checkpointed} checkpointed: "
                  f"predicted {guess * 1e3:7.1f} ms, measured {second * 1e3:7.1f} ms")  # fmt: skip
        rows.append(
            {
                "what": what,
                "points": len(points),
                "rank_correlation": correlation,
                "allowed": ALLOWED,
                "predicted_by_measured": factor,
                "grid": [
                    {**vars(point), "predicted": guess, "measured": second}
                    for point, guess, second in zip(points, guesses, seconds, strict=True)
                ],
            }
        )
    if not options.small:
        save("estimate_time", rows, device=str(device.to_json()))


if __name__ == "__main__":
    main()
