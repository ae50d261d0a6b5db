"""Refuse what cannot be compared: tensors without a correspondence, and unannounced freezing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slapo_core.errors import VerifyError
from slapo_core.verification.blame import find_steps
from slapo_core.verification.search import Failed, Outcome
from slapo_core.weights.correspondence import Correspondence

if TYPE_CHECKING:
    from slapo_core.ranks.world import World
    from slapo_core.spec.record import Record
    from slapo_core.verification.copies import Subjects


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


@dataclass(frozen=True)
class _Change:
    """What a step may do to a parameter.

    Args:
        verb: for people, e.g. ``"freeze"``.
        problem: the same, of the parameter.
        flag: what ``requires_grad`` becomes.
        suspects: whether there may be any such parameter.
        by: names of the parameters that some steps do it to.
    """

    verb: str
    problem: str
    flag: bool
    suspects: Callable[[], list[str]]
    by: Callable[[Sequence[Record]], list[str]]


def refuse_unsaid_freezing(world: World, subjects: Subjects) -> tuple[str, ...]:
    """Repeat the steps on a copy, and look at what they froze or unfroze; on every rank.

    The untouched model cannot tell: a step that changed its own parameter object changed it there too. So what is
    frozen is looked for on a copy with everything trained; what is unfrozen, on one as it was before the first step.

    Returns:
        what could not be looked at, and why.

    Raises:
        VerifyError: on every rank, naming the first such parameter and the steps that did it.
    """
    froze = _Change(
        "freeze",
        "is frozen in the scheduled model, and the step that froze it did not say so",
        False,
        subjects.frozen_parameters,
        subjects.frozen_by,
    )
    unfroze = _Change(
        "unfreeze",
        "is frozen in the untouched model and trained in the scheduled one, and the step that unfroze it did not say "
        "so",
        True,
        subjects.unfrozen_parameters,
        subjects.unfrozen_by,
    )
    return (*_refuse(world, subjects, froze), *_refuse(world, subjects, unfroze))


def _refuse(world: World, subjects: Subjects, change: _Change) -> tuple[str, ...]:
    if not any(world.gather(bool(change.suspects()))):
        return ()
    whole = subjects.schedule.records
    tried = world.attempt(lambda: change.by(whole))
    if tried.failures:
        return (f"what the steps {change.verb} was not compared, because they cannot be repeated: {tried.failures[0]}",)
    found = [(rank, names[0]) for rank, names in zip(world.ranks, world.gather(tried.value()), strict=True) if names]
    if not found:
        return ()
    rank, name = found[0]

    def try_steps(part: Sequence[Record]) -> Outcome:
        again = world.attempt(lambda: change.by(part))
        if again.failures:
            return "refused"
        froze = any(name in names for names in world.gather(again.value()))
        return Failed("frozen parameter", name) if froze else "agrees"

    path, _, own = name.rpartition(".")
    blame = find_steps(whole, try_steps, near=path, tied=subjects.tied_modules())
    raise VerifyError(
        f"parameter {name} {change.problem}\n{blame}",
        tensor=name,
        rank=None if world.is_alone else rank,
        steps=[str(record) for record in blame.records],
        path=path,
        hint=f"edit.set_requires_grad(node, '{own}', {change.flag})",
    )
