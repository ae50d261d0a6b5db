"""Which models are cut, and how they run: every schedule with every family, and the other dimensions of the mesh."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import slapo_core as slapo
from tests.integration.cells import Cell
from tests.integration.pipelines.against import Case, adamw, differences, sgd
from tests.integration.pipelines.models import FAMILIES
from tests.integration.zoo.tensor_parallel import split

__all__ = ["PipelineCell", "cells"]


@dataclass(frozen=True)
class PipelineCell(Cell):
    """One run of the matrix.

    Args:
        schedule: its name.
        stages: of the model.
        count: of micro-batches.
        full: whether the batch holds what may be left out (the attention mask).
        optimizer: ``"adamw"`` or ``"sgd"``, with momentum.
    """

    schedule: str
    stages: int
    count: int
    full: bool = False
    optimizer: str = "adamw"

    def __str__(self) -> str:
        return f"{self.family}, {self.mesh}, {self.schedule}"

    def differences(self) -> list[str]:
        return differences(self.case())

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


def cells(family: str) -> list[PipelineCell]:
    """All runs of a family."""
    found = [
        PipelineCell(family, "pp 2", "gpipe", 2, 3, True),
        PipelineCell(family, "pp 2", "1f1b", 2, 4),
        PipelineCell(family, "pp 2", "interleaved_1f1b", 4, 2, True, "sgd"),
        PipelineCell(family, "pp 2", "looped_bfs", 8, 3),
        PipelineCell(family, "pp 2", "interleaved_zero_bubble", 4, 4, True),
        PipelineCell(family, "pp 2", "zbv_zero_bubble", 4, 5, False, "sgd"),
        PipelineCell(family, "pp 2", "dualpipe_v", 4, 7, True),
        PipelineCell(family, "pp 4", "1f1b", 4, 5, True),
        PipelineCell(family, "pp 4", "interleaved_1f1b", 8, 4),
        PipelineCell(family, "pp 4", "zbv_zero_bubble", 8, 3, True),
        PipelineCell(family, "pp 4", "dualpipe_v", 8, 8, False, "sgd"),
        PipelineCell(family, "dp 2, pp 2", "1f1b", 2, 3, True),
        PipelineCell(family, "dp 2, pp 2", "zbv_zero_bubble", 4, 2),
    ]
    if FAMILIES[family].kind != "CNN":
        found += [
            PipelineCell(family, "pp 2, tp 2", "1f1b", 2, 2, True),
            PipelineCell(family, "pp 2, tp 2", "interleaved_zero_bubble", 4, 3, False, "sgd"),
        ]
    return found


def _batch(family: str, samples: int, full: bool, step: int, replica: int) -> dict[str, Any]:
    return FAMILIES[family].batch(samples, 10 * step + replica, full)


def _tensor_parallel(sch: slapo.Schedule) -> None:
    attentions, products = split(sch)
    assert attentions == 8 or attentions == 12, attentions  # those of T5's decoder twice
    assert products == 8, products
