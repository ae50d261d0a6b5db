"""Run the untouched model: what it gives, in which types it computes, and what it cannot give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from slapo_core.verification.inputs import Inputs
from slapo_core.verification.precision import DtypeObserver, coarsest, is_inexact, own_dtype
from slapo_core.verification.run import EARLY, STAGE_OF_KIND, STAGES, Conditions, Observation, run_stages, step_size
from slapo_core.verification.subjects import Subjects

__all__ = ["UntouchedRun", "UntouchedRuns"]


@dataclass
class UntouchedRun:
    """What the untouched model gave, and in which types it computed.

    Args:
        seen: every number that is compared.
        conditions: that it ran under.
        stages: that it ran, in their order.
        coarsest: the coarsest type in which it computed anything.
        finer: kind and name of the tensors that only finer types led to, with the coarsest of these.
        dtype: the type in which it ran.
        notes: what it could not give.
    """

    seen: Observation
    conditions: Conditions
    stages: tuple[str, ...]
    coarsest: torch.dtype
    finer: Mapping[tuple[str, str], torch.dtype]
    dtype: torch.dtype
    notes: tuple[str, ...]


@dataclass(frozen=True)
class UntouchedRuns:
    """Runs the untouched model.

    Args:
        inputs: one batch.
        more_batches: the user's further ones.
        subjects: gives fresh copies of it.
        seed: of everything random.
        optimizer_steps: the number of updates.
    """

    inputs: Inputs
    more_batches: tuple[Inputs, ...]
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
        finer = {
            (kind, name): found
            for kind in (kind for kind, stage in STAGE_OF_KIND.items() if stage in EARLY)
            for name, value in seen.of(kind).items()
            if isinstance(value, torch.Tensor) and _coarser(lowest, found := observer.coarsest_to(value))
        }
        return UntouchedRun(seen, conditions, EARLY, lowest, finer, base, ()), step_size(model, seen)

    def late_stages(self, reference: UntouchedRun, rate: float) -> Callable[[], tuple[UntouchedRun, float]]:
        def run() -> tuple[UntouchedRun, float]:
            conditions = dataclasses.replace(reference.conditions, learning_rate=rate)
            stages, seen = list(EARLY), reference.seen
            conditions, notes = self._with_further_batches(conditions, seen)
            if conditions.more_batches:
                stages.append("batches")

            def add(stage: str) -> None:
                model = self.subjects.reference(conditions.dtype)
                seen.values.update(run_stages(model, self.inputs, conditions, (stage,)).values)
                stages.append(stage)

            if any(is_inexact(tensor) for _, tensor in self.inputs.tensors()):
                try:
                    add("inputs")
                except Exception as error:  # noqa: BLE001 - a model need not be differentiable in its inputs
                    notes.append(
                        "gradients of the inputs were not compared, because the untouched model raises: "
                        f"{type(error).__name__}: {error}"
                    )
            if self.optimizer_steps and rate:
                add("updates")
            elif self.optimizer_steps:
                notes.append("no optimiser steps were compared, because no parameter has a finite gradient")
            if seen.of("dropout")["forward"]:
                add("dropout")
            ordered = tuple(stage for stage in STAGES if stage in stages)
            done = dataclasses.replace(reference, conditions=conditions, stages=ordered, notes=tuple(notes))
            return done, rate

        return run

    def _with_further_batches(self, conditions: Conditions, seen: Observation) -> tuple[Conditions, list[str]]:
        """The user's further batches, and the best variant of the first one that the untouched model runs on."""
        given = tuple((f"batch {number}", batch) for number, batch in enumerate(self.more_batches, start=2))
        variants, notes = self.inputs.variants(self.subjects.untouched)
        for more in (*(((variant,), variant[0]) for variant in variants), ((), "")):
            trying = dataclasses.replace(conditions, more_batches=(*given, *more[0]))
            if not trying.more_batches:
                break
            try:
                ran = run_stages(self.subjects.reference(conditions.dtype), self.inputs, trying, ("batches",))
            except Exception as error:  # not every model runs on every variant; the report says so
                if not more[0]:
                    raise
                notes.append(
                    f"{more[1]} was not compared, because the untouched model raises: {type(error).__name__}: {error}"
                )
                continue
            seen.values.update(ran.values)
            return trying, notes
        return conditions, notes


def _coarser(dtype: torch.dtype, base: torch.dtype) -> bool:
    return torch.finfo(dtype).eps > torch.finfo(base).eps
