"""Report verifications, also of several schedules together."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from slapo_core.errors import ArgumentError, VerifyError
from slapo_runtime.ranks.facts import RankFact, describe_tensor
from slapo_verify.compare import Largest
from slapo_verify.copies import named_tensors
from slapo_verify.kinds import KINDS

if TYPE_CHECKING:
    from slapo_core import Schedule


@dataclass(frozen=True)
class VerifyReport:
    """Report a scheduled model that agrees with the reference model; print it.

    Args:
        model: the type of the model, e.g. ``"BertForMaskedLM"``.
        steps_verified: the number of steps (records) of the schedule.
        world_size: the number of processes that took part.
        dtype: the type in which both models ran, e.g. ``"float64"``.
        coarsest_dtype: the coarsest type in which the reference model computes there, e.g. ``"float32"``.
        tolerance: the rule, in words.
        optimizer_steps: how many were compared.
        largest: per kind, the tensor that came closest to the tolerance, over all ranks.
        not_compared: what could not be compared, and why.
        notes: comparisons that were left out or changed, and why.
        effects: of steps that were seen, over all ranks; all that were expected. None: not looked for.
        loose: what the numbers say nothing about, because a tenth or more of the largest output is allowed, and what
            agrees nevertheless, e.g. ``"within 400 % of the largest element: the numbers say nothing about #1-4"``; ""
            where less is allowed.
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
    effects: int | None = None
    loose: str = ""

    def __str__(self) -> str:
        ranks = f"{self.world_size} ranks" if self.world_size > 1 else "1 process"
        partly = f", partly in {self.coarsest_dtype}" if self.coarsest_dtype != self.dtype else ""
        agrees = f", {self.loose}" if self.loose else " agrees with the reference model"
        lines = [
            f"verified: {self.model} with {self.steps_verified} steps{agrees} ({ranks}, {self.dtype}{partly})",
            f"  allowed: {self.tolerance}",
        ]
        width = max((len(KINDS[entry.kind].title) for entry in self.largest), default=0)
        for entry in self.largest:
            seen = f"largest difference {entry.difference:.2g} of {entry.allowed:.2g} allowed, in {entry.name}"
            if not entry.compared:
                seen = "none"
            elif entry.difference == 0:
                seen = "bitwise equal"
            lines.append(f"  {KINDS[entry.kind].title:<{width}}  {entry.compared:>4} compared: {seen}")
        if self.effects:
            lines.append(f"  effects seen: {self.effects} of {self.effects}")
        lines += [f"  not compared: {text}" for text in self.not_compared]
        lines += [f"  note: {text}" for text in self.notes]
        return "\n".join(lines)


def merge_largest(ranks: Sequence[dict[str, Largest]]) -> tuple[Largest, ...]:
    """Merge the ranks' entries: for each kind the one closest to the tolerance."""
    kinds = dict.fromkeys(kind for rank in ranks for kind in rank)
    return tuple(max((rank[kind] for rank in ranks if kind in rank), key=lambda e: e.fraction) for kind in kinds)


VerifyOutcome: TypeAlias = VerifyReport | VerifyError
"""The outcome of one schedule."""


@dataclass
class ScheduleSet:
    """Hold the schedules of one call, which must share the reference model.

    Args:
        schedules: all of them, in the order in which they were given.
    """

    schedules: Sequence[Schedule]
    _first: dict[str, str] = field(default_factory=dict)

    def require_same_model(self, schedule: Schedule, reference_model: nn.Module) -> None:
        """Compare the reference model with that of the first schedule.

        Raises:
            ArgumentError: it is another one; the first module or tensor that differs is named.
        """
        if len(self.schedules) == 1:
            return
        facts = dict(_facts(reference_model))
        first, self._first = self._first, self._first or facts
        for what in dict.fromkeys((*first, *facts)) if first else ():
            one, other = first.get(what, "(nothing)"), facts.get(what, "(nothing)")
            if one != other:
                raise ArgumentError(
                    "verify compares schedules of one model, and the reference models differ in "
                    f"{what}:\n  schedule 1: {one}\n  schedule {self._number(schedule)}: {other}",
                    hint="make the models equal: the same class, arguments and torch.manual_seed(0) before each, or "
                    "model_b.load_state_dict(model_a.state_dict()) before the schedule; or call verify once for each",
                )

    def facts(self, ranks: Sequence[int]) -> Iterator[RankFact]:
        """Yield the facts that must be equal on all ranks of a mesh."""
        number = sum(1 for schedule in self.schedules if _ranks(schedule) == tuple(ranks))
        yield RankFact("the number of schedules given to verify", str(number))

    def _number(self, schedule: Schedule) -> int:
        return 1 + next(number for number, other in enumerate(self.schedules) if other is schedule)


def conclude(outcomes: Sequence[VerifyOutcome]) -> tuple[VerifyReport, ...]:
    """Return the reports of all schedules.

    Raises:
        VerifyError: of the first that differs; of several, the message says which, with the others' outcomes.
    """
    errors = {number: outcome for number, outcome in enumerate(outcomes, 1) if isinstance(outcome, VerifyError)}
    if not errors:
        return tuple(outcome for outcome in outcomes if isinstance(outcome, VerifyReport))
    first, error = next(iter(errors.items()))
    if len(outcomes) == 1:
        raise error
    lines = [f"schedule {first} of {len(outcomes)}: {error.message}"]
    for number in range(1, len(outcomes) + 1):
        if number not in errors:
            lines.append(f"  schedule {number} agrees with the reference model")
        elif number != first:
            lines.append(f"  schedule {number} fails too: {errors[number].message.splitlines()[0]}")
    named = copy.copy(error)
    named.message = "\n".join(lines)
    raise named from error


def _facts(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        name = type(module).__qualname__
        yield f"module '{path}'" if path else "the root", f"{name}({module.extra_repr()})"
    for name, tensor in named_tensors(model):
        yield f"'{name}'", describe_tensor(tensor)


def _ranks(schedule: Schedule) -> tuple[int, ...]:
    mesh = schedule.mesh
    if mesh is None or mesh.device_mesh is None:
        return (0,)
    return tuple(sorted(mesh.device_mesh.mesh.flatten().tolist()))
