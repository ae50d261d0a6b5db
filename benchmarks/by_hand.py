"""The frame of what a target costs against its runtime used by hand: both on the same ranks, step by step in turn."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from report import interleaved, ratio_of_medians, save
from step_cost import HIDDEN, LENGTH, Stack

from slapo_testing import preload_modules, run_ranks

__all__ = ["BATCH", "MICROBATCHES", "Step", "Way", "adamw", "main", "stack"]

ALLOWED = 1.05  # where the 95 % interval of the ratio of the medians must end
BATCH, MICROBATCHES = 8, 4

Step = Callable[[], float | None]
"""Gives the loss; by hand, None where this rank has none."""


@dataclass(frozen=True)
class Way:
    """One question.

    Args:
        by_schedule: makes our step for a batch of shape (``BATCH``, ``LENGTH``, ``HIDDEN``) and ``options``; the step
            gives the loss.
        by_hand: the same without slapo.
        options: for both.
    """

    by_schedule: Callable[..., Step]
    by_hand: Callable[..., Step]
    options: Mapping[str, Any] = field(default_factory=dict)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def compare_steps(way: Way, pairs: int, clock: str) -> tuple[list[float], list[float]]:
    """On each of two ranks: both steps in turn, after they were found to give the same losses."""
    torch.set_num_threads(1)
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    by_schedule, by_hand = way.by_schedule(x, **way.options), way.by_hand(x, **way.options)
    losses = [(by_schedule(), by_hand()) for _ in range(3)]
    for loss, expected in losses:
        assert loss is not None, losses
        assert expected is None or abs(loss - expected) < 1e-5 * abs(expected), losses
    assert losses[2] != losses[0], losses  # it trains
    return interleaved(by_schedule, by_hand, pairs=pairs, clock=getattr(time, clock))


def main(name: str, description: str, ways: Mapping[str, Way], package: str, preloaded: tuple[str, ...]) -> None:
    """Ask everything, print it and keep it.

    Args:
        name: of the file of the results.
        description: for ``--help``.
        ways: by the question.
        package: of the runtime, whose version is kept.
        preloaded: modules that ranks need, imported once.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, help="interleaved pairs of steps (default: %(default)s)")
    parser.add_argument("--only", choices=list(ways), action="append", help="only this question; nothing is kept")
    parser.add_argument("--cpu-time", action="store_true", help="of rank 0, for a busy machine; nothing is kept")
    options = parser.parse_args()
    clock = "process_time" if options.cpu_time else "perf_counter"
    preload_modules(*preloaded)
    rows = []
    for question in options.only or ways:
        ours, theirs = run_ranks(compare_steps, ways[question], options.pairs, clock, world_size=2, timeout=3600)[0]
        row = {
            "question": question,
            **ratio_of_medians(ours, theirs),
            "by_hand": statistics.median(theirs),
            "allowed": ALLOWED,
        }
        rows.append(row)
        low, high = row["interval_95"]
        print(
            f"{question:<46} {row['ratio']:.3f} (95 %: {low:.3f} to {high:.3f}, by hand "
            f"{1000 * row['by_hand']:.0f} ms)   allowed {ALLOWED}",
            flush=True,
        )
    if not options.only and not options.cpu_time:
        save(name, rows, **{package: version(package)})
