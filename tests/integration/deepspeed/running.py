"""Many cells in one launch of ranks: starting processes and importing DeepSpeed takes longer than a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch

import slapo_core as slapo
from tests.integration.deepspeed.cases import Cell, differences
from tests.integration.deepspeed.same_file import differences_of_targets

__all__ = ["WAYS", "Run", "run_cells"]

WAYS: dict[str, Callable[[Cell], Iterable[str]]] = {"untouched": differences, "both targets": differences_of_targets}
"""What a cell can be held against."""

Run = tuple[str, Cell]
"""One of ``WAYS``, and the cell."""


def run_cells(runs: Sequence[Run]) -> list[tuple[list[str], float]]:
    """On every rank: what differs in each of them, and its seconds of CPU time."""
    torch.set_num_threads(1)
    found = []
    for way, cell in runs:
        start = time.process_time()
        try:
            differing = list(WAYS[way](cell))
        except slapo.SlapoError as error:
            differing = [f"{type(error).__name__}: {error}"]
        found.append((differing, time.process_time() - start))
    return found
