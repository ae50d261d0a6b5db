"""Several schedules of one model: each is compared with the untouched model, and so with each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from slapo_core.errors import ArgumentError, VerifyError
from slapo_core.ranks.facts import RankFact, describe_tensor
from slapo_core.verification.counterparts import named_tensors
from slapo_core.verification.report import VerifyReport

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["Outcome", "Siblings", "conclude"]

Outcome: TypeAlias = VerifyReport | VerifyError
"""What came of one schedule."""


@dataclass
class Siblings:
    """What the schedules of one call have in common.

    Args:
        schedules: all of them, in the order in which they were given.
    """

    schedules: Sequence[Schedule]
    _first: dict[str, str] = field(default_factory=dict)

    def require_same_model(self, schedule: Schedule, untouched: nn.Module) -> None:
        """Compare the untouched model with that of the first schedule.

        Raises:
            ArgumentError: it is another one; the first module or tensor that differs is named.
        """
        if len(self.schedules) == 1:
            return
        facts = dict(_facts(untouched))
        first, self._first = self._first, self._first or facts
        for what in dict.fromkeys((*first, *facts)) if first else ():
            one, other = first.get(what, "(nothing)"), facts.get(what, "(nothing)")
            if one != other:
                raise ArgumentError(
                    "verify compares schedules of one model, and the untouched models differ in "
                    f"{what}:\n  schedule 1: {one}\n  schedule {self._number(schedule)}: {other}",
                    hint="make the models alike: the same class, arguments and torch.manual_seed(0) before each, or "
                    "model_b.load_state_dict(model_a.state_dict()) before the schedule; or call verify once for each",
                )

    def facts(self, ranks: Sequence[int]) -> Iterator[RankFact]:
        """What must be the same on all ranks of a mesh, lest one waits for a comparison that no other makes."""
        number = sum(1 for schedule in self.schedules if _ranks(schedule) == tuple(ranks))
        yield RankFact("the number of schedules given to verify", str(number))

    def _number(self, schedule: Schedule) -> int:
        return 1 + next(number for number, other in enumerate(self.schedules) if other is schedule)


def conclude(outcomes: Sequence[Outcome]) -> tuple[VerifyReport, ...]:
    """The reports of all schedules.

    Raises:
        VerifyError: of the first one that differs; where there are several, it says which, and what came of the others.
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
            lines.append(f"  schedule {number} agrees with the untouched model")
        elif number != first:
            lines.append(f"  schedule {number} fails too: {errors[number].message.splitlines()[0]}")
    raise VerifyError(
        "\n".join(lines),
        tensor=error.tensor,
        difference=error.difference,
        tolerance=error.tolerance,
        rank=error.rank,
        steps=error.steps,
        path=error.path,
        hint=error.hint,
    ) from error


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
