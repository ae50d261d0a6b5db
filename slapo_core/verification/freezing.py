"""A step that freezes a parameter says so: then both models are compared with it frozen, or else it is a failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slapo_core.errors import VerifyError
from slapo_core.verification.blame import find_steps
from slapo_core.verification.failing import Failed, Outcome

if TYPE_CHECKING:
    from slapo_core.ranks.world import World
    from slapo_core.spec.record import Record
    from slapo_core.verification.subjects import Subjects

__all__ = ["refuse_unsaid_freezing"]


def refuse_unsaid_freezing(world: World, subjects: Subjects) -> tuple[str, ...]:
    """Repeat the steps on a copy with everything trained, and look at what they froze; on every rank.

    The untouched model cannot tell: a step that froze its own parameter object froze it there too.

    Returns:
        what could not be looked at, and why.

    Raises:
        VerifyError: on every rank, naming the first such parameter and the steps that froze it.
    """
    if not any(world.gather(bool(subjects.frozen_parameters()))):
        return ()
    whole = subjects.schedule.records
    tried = world.attempt(lambda: subjects.frozen_by(whole))
    if tried.failures:
        return (f"what the steps freeze was not compared, because they cannot be repeated: {tried.failures[0]}",)
    found = [(rank, names[0]) for rank, names in zip(world.ranks, world.gather(tried.value()), strict=True) if names]
    if not found:
        return ()
    rank, name = found[0]

    def try_steps(part: Sequence[Record]) -> Outcome:
        again = world.attempt(lambda: subjects.frozen_by(part))
        if again.failures:
            return "refused"
        froze = any(name in names for names in world.gather(again.value()))
        return Failed("frozen parameter", name) if froze else "agrees"

    path, _, own = name.rpartition(".")
    blame = find_steps(whole, try_steps, near=path, tied=subjects.tied_modules())
    raise VerifyError(
        f"parameter {name} is frozen in the scheduled model, and the step that froze it did not say so\n{blame}",
        tensor=name,
        rank=None if world.is_alone else rank,
        steps=[str(record) for record in blame.records],
        path=path,
        hint=f"edit.set_requires_grad(node, '{own}', False)",
    )
