"""Tensors of which nobody says what they stand for cannot be compared: a failure, and not something to pass over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slapo_core.errors import VerifyError
from slapo_core.verification.blame import find_steps
from slapo_core.verification.failing import Failed, Outcome
from slapo_core.weights.correspondence import Correspondence

if TYPE_CHECKING:
    from slapo_core.ranks.world import World
    from slapo_core.spec.record import Record
    from slapo_core.verification.subjects import Subjects

__all__ = ["refuse_unexplained"]


def refuse_unexplained(world: World, subjects: Subjects) -> None:
    """Look at what each tensor stands for, on every rank.

    Raises:
        VerifyError: on every rank, naming the first such tensor and the steps that did it.
    """
    own = subjects.correspondence.unexplained()
    by_rank = zip(world.ranks, world.gather(own[:1]), strict=True)
    rank, found = next(((rank, items[0]) for rank, items in by_rank if items), (None, None))
    if found is None:
        return

    def try_steps(part: Sequence[Record]) -> Outcome:
        tried = world.attempt(lambda: Correspondence.of(subjects.trial(part))[0].unexplained())
        if tried.failures:
            return "refused"
        return Failed("unexplained tensor", "") if any(world.gather(bool(tried.value()))) else "agrees"

    path = found.name.rpartition(".")[0]
    blame = find_steps(subjects.schedule.records, try_steps, near=path, tied=subjects.tied_modules())
    raise VerifyError(
        f"the scheduled model cannot be compared with the untouched one: {found.message}\n{blame}",
        tensor=found.name,
        rank=None if world.is_alone else rank,
        steps=[str(record) for record in blame.records],
        path=path,
        hint=found.hint,
    )
