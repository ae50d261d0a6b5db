"""What a verification compared, and how close it came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slapo_core.verification.compare import Largest

__all__ = ["VerifyReport", "merge_largest"]

_TITLES = {
    "output": "outputs, training mode",
    "buffer": "buffers after a training step",
    "gradient": "gradients of parameters",
    "evaluation output": "outputs, evaluation mode",
    "evaluation buffer": "buffers after evaluation",
    "batch output": "outputs, further batches",
    "batch gradient": "gradients, further batches",
    "input gradient": "gradients of inputs",
    "parameter": "parameters after the optimiser steps",
    "updated output": "outputs after the optimiser steps",
    "updated buffer": "buffers after the optimiser steps",
    "output with dropout": "outputs with dropout",
    "gradient with dropout": "gradients with dropout",
    "own output": "outputs, own types",
    "own buffer": "buffers, own types",
    "own gradient": "gradients, own types",
    "own evaluation output": "outputs, evaluation mode, own types",
}


@dataclass(frozen=True)
class VerifyReport:
    """A scheduled model that agrees with the untouched one; print it.

    Args:
        model: the type of the model, e.g. ``"BertForMaskedLM"``.
        steps_verified: the number of steps (records) of the schedule.
        world_size: the number of processes that took part.
        dtype: the type in which both models ran, e.g. ``"float64"``.
        coarsest_dtype: the coarsest type in which the untouched model computes there, e.g. ``"float32"``.
        tolerance: the rule, in words.
        optimizer_steps: how many were compared.
        largest: per kind, the tensor that came closest to the tolerance, over all ranks.
        not_compared: what could not be compared, and why.
        notes: what was done otherwise than asked, and why.
    """

    model: str
    steps_verified: int
    world_size: int
    dtype: str
    coarsest_dtype: str
    tolerance: str
    optimizer_steps: int
    largest: tuple[Largest, ...]
    not_compared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        ranks = f"{self.world_size} ranks" if self.world_size > 1 else "1 process"
        partly = f", partly in {self.coarsest_dtype}" if self.coarsest_dtype != self.dtype else ""
        lines = [
            f"verified: {self.model} with {self.steps_verified} steps agrees with the untouched model "
            f"({ranks}, {self.dtype}{partly})",
            f"  allowed: {self.tolerance}",
        ]
        width = max((len(_TITLES[entry.kind]) for entry in self.largest), default=0)
        for entry in self.largest:
            seen = f"largest difference {entry.difference:.2g} of {entry.allowed:.2g} allowed, in {entry.name}"
            if not entry.compared:
                seen = "none"
            elif entry.difference == 0:
                seen = "bitwise equal"
            lines.append(f"  {_TITLES[entry.kind]:<{width}}  {entry.compared:>4} compared: {seen}")
        lines += [f"  not compared: {text}" for text in self.not_compared]
        lines += [f"  note: {text}" for text in self.notes]
        return "\n".join(lines)


def merge_largest(ranks: Sequence[dict[str, Largest]]) -> tuple[Largest, ...]:
    """Per kind, the entry of the rank that came closest to the tolerance."""
    kinds = dict.fromkeys(kind for rank in ranks for kind in rank)
    return tuple(max((rank[kind] for rank in ranks if kind in rank), key=lambda e: e.fraction) for kind in kinds)
