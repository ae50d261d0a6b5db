"""Run the untouched model: what it gives, in which types it computes, and what it cannot give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from slapo_core.verification.inputs import Inputs
from slapo_core.verification.precision import DtypeObserver, coarsest, is_inexact, own_dtype
from slapo_core.verification.run import STAGES, Conditions, Observation, run_stages, step_size
from slapo_core.verification.subjects import Subjects

__all__ = ["EARLY", "UntouchedRun", "UntouchedRuns"]

EARLY = STAGES[:2]
"""The stages that every model can run; on one copy."""


@dataclass
class UntouchedRun:
    """What the untouched model gave, and in which types it computed."""

    seen: Observation
    conditions: Conditions
    stages: tuple[str, ...]
    coarsest: torch.dtype
    dtype: torch.dtype
    notes: tuple[str, ...]


@dataclass(frozen=True)
class UntouchedRuns:
    """Runs the untouched model.

    Args:
        inputs: one batch.
        subjects: gives fresh copies of it.
        seed: of everything random.
        optimizer_steps: the number of updates.
    """

    inputs: Inputs
    subjects: Subjects
    seed: int
    optimizer_steps: int

    def run(self, dtype: torch.dtype | None) -> tuple[UntouchedRun, float]:
        """The first two stages of the untouched model, and the learning rate for the last."""
        model = self.subjects.reference(dtype)
        conditions = Conditions(dtype=dtype, seed=self.seed, optimizer_steps=self.optimizer_steps)
        base = dtype or own_dtype(model, (tensor for _, tensor in self.inputs.tensors()))
        inputs = self.inputs.cast(dtype)  # before observing: the conversion is not the model's
        observer = DtypeObserver()
        with observer:
            seen = run_stages(model, inputs, conditions, EARLY)
        lowest = coarsest([base, *(found for found in observer.seen if _coarser(found, base))])
        return UntouchedRun(seen, conditions, EARLY, lowest, base, ()), step_size(model, seen)

    def late_stages(self, reference: UntouchedRun, rate: float) -> Callable[[], tuple[UntouchedRun, float]]:
        def run() -> tuple[UntouchedRun, float]:
            conditions, dtype = reference.conditions, reference.conditions.dtype
            stages, notes = list(EARLY), []
            if any(is_inexact(tensor) for _, tensor in self.inputs.tensors()):
                refusal = self._run_input_stage(dtype, conditions, reference.seen)
                if refusal is None:
                    stages.append("inputs")
                else:
                    notes.append(
                        f"gradients of the inputs were not compared, because the untouched model raises: {refusal}"
                    )
            if self.optimizer_steps and rate:
                conditions = dataclasses.replace(conditions, learning_rate=rate)
                late = run_stages(self.subjects.reference(dtype), self.inputs, conditions, ("updates",))
                reference.seen.values.update(late.values)
                stages.append("updates")
            elif self.optimizer_steps:
                notes.append("no optimiser steps were compared, because no parameter has a finite gradient")
            done = dataclasses.replace(reference, conditions=conditions, stages=tuple(stages), notes=tuple(notes))
            return done, rate

        return run

    def _run_input_stage(self, dtype: torch.dtype | None, conditions: Conditions, seen: Observation) -> str | None:
        """Gradients of the inputs of the untouched model; what it raised if it cannot give them."""
        try:
            late = run_stages(self.subjects.reference(dtype), self.inputs, conditions, ("inputs",))
        except Exception as error:  # noqa: BLE001 - a model need not be differentiable in its inputs; the report says so
            return f"{type(error).__name__}: {error}"
        seen.values.update(late.values)
        return None


def _coarser(dtype: torch.dtype, base: torch.dtype) -> bool:
    return torch.finfo(dtype).eps > torch.finfo(base).eps
