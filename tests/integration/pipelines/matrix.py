"""Which models are cut, and how they run: every schedule with every family, and the other dimensions of the mesh."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import slapo_core as slapo
from tests.integration.pipelines.against import Case, adamw, differences, sgd
from tests.integration.pipelines.models import FAMILIES
from tests.integration.zoo.tensor_parallel import split

__all__ = ["Cell", "cells", "run_cells"]


@dataclass(frozen=True)
class Cell:
    """One run of the matrix.

    Args:
        family: of the model.
        mesh: sizes, as text, e.g. ``"pp 2, tp 2"``.
        schedule: its name.
        stages: of the model.
        count: of micro-batches.
        full: whether the batch holds what may be left out (the attention mask).
        optimizer: ``"adamw"`` or ``"sgd"``, with momentum.
    """

    family: str
    mesh: str
    schedule: str
    stages: int
    count: int
    full: bool = False
    optimizer: str = "adamw"

    @property
    def sizes(self) -> dict[str, int]:
        return {name: int(size) for name, size in (part.split() for part in self.mesh.split(", "))}

    @property
    def world_size(self) -> int:
        sizes = list(self.sizes.values())
        return sizes[0] * (sizes[1] if len(sizes) > 1 else 1)

    def case(self) -> Case:
        family = FAMILIES[self.family]
        batch = functools.partial(_batch, self.family, 2 * self.count, self.full)
        return Case(
            family.make,
            batch,
            family.cuts(self.stages),
            self.sizes,
            self.schedule,
            self.count,
            steps=_tensor_parallel if "tp" in self.sizes else None,
            optimizer={"adamw": adamw, "sgd": sgd}[self.optimizer],
            options={"max_grad_norm": 1.0} if self.count % 2 else {},
            tolerance=1e-9,
        )


def cells(family: str) -> list[Cell]:
    """All runs of a family."""
    found = [
        Cell(family, "pp 2", "gpipe", 2, 3, True),
        Cell(family, "pp 2", "1f1b", 2, 4),
        Cell(family, "pp 2", "interleaved_1f1b", 4, 2, True, "sgd"),
        Cell(family, "pp 2", "looped_bfs", 8, 3),
        Cell(family, "pp 2", "interleaved_zero_bubble", 4, 4, True),
        Cell(family, "pp 2", "zbv_zero_bubble", 4, 5, False, "sgd"),
        Cell(family, "pp 2", "dualpipe_v", 4, 7, True),
        Cell(family, "pp 4", "1f1b", 4, 5, True),
        Cell(family, "pp 4", "interleaved_1f1b", 8, 4),
        Cell(family, "pp 4", "zbv_zero_bubble", 8, 3, True),
        Cell(family, "pp 4", "dualpipe_v", 8, 8, False, "sgd"),
        Cell(family, "dp 2, pp 2", "1f1b", 2, 3, True),
        Cell(family, "dp 2, pp 2", "zbv_zero_bubble", 4, 2),
    ]
    if FAMILIES[family].kind != "CNN":
        found += [
            Cell(family, "pp 2, tp 2", "1f1b", 2, 2, True),
            Cell(family, "pp 2, tp 2", "interleaved_zero_bubble", 4, 3, False, "sgd"),
        ]
    return found


def run_cells(chosen: Sequence[Cell]) -> list[tuple[list[str], float]]:
    """On every rank: what differs in each of them, and its seconds of CPU time."""
    torch.set_num_threads(1)
    found = []
    for cell in chosen:
        start = time.process_time()
        try:
            differing = differences(cell.case())
        except slapo.SlapoError as error:
            differing = [f"{type(error).__name__}: {error}"]
        found.append((differing, time.process_time() - start))
    return found


def _batch(family: str, samples: int, full: bool, step: int, replica: int) -> dict[str, Any]:
    return FAMILIES[family].batch(samples, 10 * step + replica, full)


def _tensor_parallel(sch: slapo.Schedule) -> None:
    attentions, products = split(sch)
    assert attentions == 8 or attentions == 12, attentions  # those of T5's decoder twice
    assert products == 8, products
