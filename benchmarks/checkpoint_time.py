"""What a checkpoint costs a training: how long saving blocks it, and a step while a worker process writes."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import in_turn, save
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import slapo_core as slapo
from slapo_testing import run_ranks

RANKS = 2
WORDS, LENGTH, BATCH = 4096, 64, 4
ALLOWED = {"of a step": 0.05, "seconds": 1.0}
"""For the time that an asynchronous save blocks: the larger of both."""


BLOCKS = "asynchronous save"


def make_engine() -> tuple[Any, dict[str, torch.Tensor]]:
    """A LLaMA of 30 million parameters, sharded over the ranks, and a batch for it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(WORDS, (BATCH, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    sch = slapo.create_schedule(LlamaForCausalLM(config).train(), mesh={"dp": RANKS}, example_inputs=batch)
    make = lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)  # noqa: E731
    return slapo.build(sch, data_parallel="fsdp", optimizer=make), batch


def measure(rounds: int, directory: Path) -> list[dict[str, float]]:
    """Seconds of each round on this rank: a step, a save, and an asynchronous one with a step beside it, in turn."""
    engine, batch = make_engine()
    beside: dict[str, float] = {}

    def timed(call: Callable[[], Any]) -> float:
        dist.barrier()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def asynchronous() -> float:
        pending: list[Any] = []
        start, used = time.perf_counter(), time.process_time()
        blocks = timed(lambda: pending.append(engine.save(directory, keep=1, asynchronous=True)))
        beside["its processor time"] = time.process_time() - used
        beside["step beside it"] = timed(lambda: engine.train_step(batch))
        pending[0].wait()
        beside["complete"] = time.perf_counter() - start
        return blocks

    measures = {
        "step": lambda: timed(lambda: engine.train_step(batch)),
        "save": lambda: timed(lambda: engine.save(directory, keep=1)),
        BLOCKS: asynchronous,
    }
    return [{**in_turn(measures, number), **beside} for number in tqdm(range(rounds), disable=dist.get_rank() > 0)]


def main() -> None:
    """Measure, print the table and keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="the first one is left out (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        ranks = run_ranks(measure, options.rounds, Path(directory) / "saved", world_size=RANKS, timeout=3600)
        written = sum(file.stat().st_size for file in Path(directory).rglob("*") if file.is_file())
    rounds = [{name: max(rank[name] for rank in one) for name in one[0]} for one in zip(*ranks, strict=True)]
    rows = []
    for name in rounds[0]:
        first, *times = (one[name] for one in rounds)
        lower, middle, upper = statistics.quantiles(times, n=4)
        rows.append({"what": name, "seconds": middle, "quartile_1": lower, "quartile_3": upper, "first": first})
        print(f"{name:<20} {1e3 * middle:7.0f} ms ({1e3 * lower:.0f} to {1e3 * upper:.0f}, first {1e3 * first:.0f})")
    step, blocks = (next(row["seconds"] for row in rows if row["what"] == what) for what in ("step", BLOCKS))
    allowed = max(ALLOWED["of a step"] * step, ALLOWED["seconds"])
    print(f"{written / 1e6:.0f} MB; an asynchronous save blocks {blocks / step:.1%} of a step, allowed {allowed:.2f} s")
    save("checkpoint_time", rows, ranks=RANKS, bytes=written, allowed=ALLOWED, load=os.getloadavg()[0])
    if blocks > allowed:
        sys.exit(1)


if __name__ == "__main__":
    main()
