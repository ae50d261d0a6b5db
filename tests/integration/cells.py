"""Cells of a matrix, and many of them in one launch of ranks: starting processes takes longer than a run."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

import slapo_core as slapo

__all__ = ["Cell", "run_cells"]


@dataclass(frozen=True)
class Cell(ABC):
    """One run.

    Args:
        family: of the model, e.g. ``"bert"``.
        mesh: sizes, as text, e.g. ``"pp 2, tp 2"``.
    """

    family: str
    mesh: str

    @property
    def sizes(self) -> dict[str, int]:
        return {name: int(size) for name, size in (part.split() for part in self.mesh.split(", "))}

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    @abstractmethod
    def differences(self) -> Iterable[str]:
        """What this rank does otherwise than it should; every rank of the mesh calls it."""


def run_cells(cells: Sequence[Cell]) -> list[tuple[list[str], float]]:
    """On every rank: what differs in each of them, and its seconds of CPU time."""
    torch.set_num_threads(1)
    found = []
    for cell in cells:
        start = time.process_time()
        try:
            differing = list(cell.differences())
        except slapo.SlapoError as error:
            differing = [f"{type(error).__name__}: {error}"]
        found.append((differing, time.process_time() - start))
    return found
