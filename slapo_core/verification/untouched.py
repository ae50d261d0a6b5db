"""Run the untouched model: what it gives, in which types it computes, and what it cannot give."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from slapo_core.verification.inputs import Inputs
from slapo_core.verification.passes import Conditions
from slapo_core.verification.precision import DtypeObserver, coarsest, is_inexact, own_dtype
from slapo_core.verification.rounding import room_for_rounding
from slapo_core.verification.run import (
    EARLY,
    ON_ONE_COPY,
    OWN_TYPES,
    STAGE_OF_KIND,
    Course,
    Observation,
    run_stages,
    step_size,
)
from slapo_core.verification.subjects import Subjects

__all__ = ["Batches", "UntouchedRun", "UntouchedRuns"]

Batches = tuple[tuple[str, Inputs], ...]
"""Batches, each with what to call it."""


@dataclass
class UntouchedRun:
    """What the untouched model gave, and in which types it computed.

    Args:
        seen: what it gave in those stages that are being compared.
        conditions: that it ran under.
        stages: that it ran, in their order.
        coarsest: the coarsest type in which it computed anything.
        finer: kind and name of the tensors that other types led to, with the coarsest of these.
        dtype: the type in which it ran.
        room: kind and name of the tensors in its own types -> the absolute difference that its own rounding makes.
    """

    seen: Observation
    conditions: Conditions
    stages: tuple[str, ...]
    coarsest: torch.dtype
    finer: Mapping[tuple[str, str], torch.dtype]
    dtype: torch.dtype
    room: Mapping[tuple[str, str], float] = field(default_factory=dict)


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

    def start(self, dtype: torch.dtype | None) -> tuple[UntouchedRun, Course, float]:
        """The stages that every model can run, the copy that ran them, and a learning rate for the updates."""
        conditions = Conditions(dtype=dtype, seed=self.seed, optimizer_steps=self.optimizer_steps)
        model = self.subjects.reference(dtype)
        base = dtype or own_dtype(model, (tensor for _, tensor in self.inputs.tensors()))
        course = Course(model, self.inputs.cast(dtype), conditions)  # before observing: casting is not the model's
        observer = DtypeObserver()
        with observer:
            seen = course.run(EARLY)
        course.inputs = self.inputs
        _require_gradients(course, seen)
        lowest, finer = _types(seen, observer, base)
        conditions = dataclasses.replace(conditions, choices=tuple(observer.choices))
        return UntouchedRun(seen, conditions, EARLY, lowest, finer, base), course, step_size(model, seen)

    def add(self, reference: UntouchedRun, stage: str, course: Course | None = None) -> None:
        """One more stage: what it gives is added to what was seen."""
        conditions = reference.conditions
        if stage == OWN_TYPES:
            self._add_own_types(reference)
        elif stage in ON_ONE_COPY:
            assert course is not None
            course.conditions = conditions
            reference.seen.values.update(course.run((stage,)).values)
        else:
            model = self.subjects.reference(conditions.dtype)
            reference.seen.values.update(run_stages(model, self.inputs, conditions, (stage,)).values)
        reference.stages = (*reference.stages, stage)

    def again(self, reference: UntouchedRun, stages: Sequence[str]) -> UntouchedRun:
        """The same run with what ``stages`` give, of those that it ran."""
        repeated, course, _ = self.start(reference.conditions.dtype)
        again = dataclasses.replace(reference, seen=repeated.seen, stages=EARLY)
        for stage in stages:
            if stage in reference.stages and stage not in EARLY:
                self.add(again, stage, course)
        return again

    def is_differentiable(self) -> bool:
        """Whether there are inputs that may have a gradient."""
        return any(is_inexact(tensor) for _, tensor in self.inputs.tensors())

    def further_batches(self) -> tuple[list[tuple[Batches, str]], tuple[str, Inputs] | None, list[str]]:
        """Further batches to try, the best first: what to run, and what is called the variant in it; notes last.

        The user's own are in all of them; the last one has no variant. In the middle: the batch of one, to run beside
        them.
        """
        given = tuple((f"batch {number}", batch) for number, batch in enumerate(self.more_batches, start=2))
        variants, notes = self.inputs.variants(self.subjects.untouched)
        choices = [((*given, variant), variant[0]) for variant in variants]
        return [*choices, (given, "")], self.inputs.of_one(), notes

    def _add_own_types(self, reference: UntouchedRun) -> None:
        model = self.subjects.reference(None)
        base = own_dtype(model, (tensor for _, tensor in self.inputs.tensors()))
        observer = DtypeObserver()
        with observer:
            seen = run_stages(model, self.inputs, reference.conditions, (OWN_TYPES,))
        lowest, finer = _types(seen, observer, base)
        types = {(kind, name): finer.get((kind, name), lowest) for kind in seen.values for name in seen.of(kind)}
        reference.room = room_for_rounding(reference.seen, seen, types)
        reference.finer = {**reference.finer, **types}
        reference.seen.values.update(seen.values)


def _require_gradients(course: Course, seen: Observation) -> None:
    """
    Raises:
        ValueError: nothing that is trained has a gradient, so that no backward pass could be compared.
    """
    trained = [name for name, parameter in course.model.named_parameters() if parameter.requires_grad]
    if trained and all(gradient is None for gradient in seen.of("gradient").values()):
        raise ValueError(
            f"no output requires grad, but {len(trained)} parameters are trained, e.g. '{trained[0]}': freeze them "
            "(requires_grad_(False)), or return an output that is not detached"
        )


def _types(
    seen: Observation, observer: DtypeObserver, base: torch.dtype
) -> tuple[torch.dtype, dict[tuple[str, str], torch.dtype]]:
    """The coarsest type that a run computed in, and that of each tensor that only finer ones led to."""
    lowest = coarsest([base, *(found for found in observer.seen if _coarser(found, base))])
    finer = {
        (kind, name): found
        for kind in STAGE_OF_KIND
        for name, value in seen.of(kind).items()
        if isinstance(value, torch.Tensor) and _coarser(lowest, found := observer.coarsest_to(value))
    }
    return lowest, finer


def _coarser(dtype: torch.dtype, base: torch.dtype) -> bool:
    return torch.finfo(dtype).eps > torch.finfo(base).eps
