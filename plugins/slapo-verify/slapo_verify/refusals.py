"""Refuse schedules that cannot be compared: tensors without a correspondence, unannounced freezing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

from slapo_core.errors import VerifyError
from slapo_runtime.correspondence import Correspondence
from slapo_verify.blame import find_steps
from slapo_verify.search import Failed, TrialOutcome

if TYPE_CHECKING:
    from slapo_core.primitive import Record
    from slapo_runtime.ranks.world import World
    from slapo_verify.copies import ModelCopies

T = TypeVar("T")


def refuse_unexplained(world: World, copies: ModelCopies) -> None:
    """Check the correspondence of every tensor, on every rank.

    Raises:
        VerifyError: on every rank, naming the first tensor without a correspondence and the steps that made it.
    """
    rank, found = _first(world, copies.correspondence.unexplained())
    if found is not None:
        problem = f"the scheduled model cannot be compared with the reference model: {found.message}"
        is_wrong = lambda part: bool(Correspondence.of(copies.trial(part))[0].unexplained())  # noqa: E731
        _refuse(world, copies, is_wrong, problem, rank=rank, name=found.name, hint=found.hint)


def refuse_unsaid_freezing(world: World, copies: ModelCopies) -> list[str]:
    """Check on a copy which parameters the steps froze or unfroze undeclared.

    The reference model does not show it: a step that changed its own parameter object changed it there too. So frozen
    parameters are searched on a copy with everything trained; unfrozen ones, on a copy as before the first step.

    Returns:
        notes on checks that could not run, and why.

    Raises:
        VerifyError: on every rank, naming the first such parameter and the steps that did it.
    """
    frozen = "is frozen in the scheduled model, and the step that froze it"
    unfrozen = "is frozen in the reference model and trained in the scheduled one, and the step that unfroze it"
    notes = []
    for verb, state, suspects, names_by in (
        ("freeze", frozen, copies.frozen_parameters, copies.frozen_by),
        ("unfreeze", unfrozen, copies.unfrozen_parameters, copies.unfrozen_by),
    ):
        if not any(world.gather(bool(suspects()))):
            continue
        tried = world.attempt(functools.partial(names_by, copies.schedule.records))
        if tried.failures:
            why = f"because they cannot be repeated: {tried.failures[0]}"
            notes.append(f"parameters that steps {verb} were not compared, {why}")
            continue
        rank, name = _first(world, tried.value())
        if name is not None:
            is_wrong = functools.partial(_is_among, name, names_by)
            hint = f"edit.set_requires_grad(node, '{name.rpartition('.')[2]}', {state is unfrozen})"
            problem = f"parameter {name} {state} did not declare it"
            _refuse(world, copies, is_wrong, problem, rank=rank, name=name, hint=hint)
    return notes


def _is_among(name: str, names_by: Callable[[Sequence[Record]], list[str]], part: Sequence[Record]) -> bool:
    return name in names_by(part)


def _first(world: World, found: Sequence[T]) -> tuple[int, T] | tuple[int, None]:
    """Return the first finding of any rank, and the rank."""
    by_rank = zip(world.ranks, world.gather(list(found[:1])), strict=True)
    return next(((rank, items[0]) for rank, items in by_rank if items), (0, None))


def _refuse(
    world: World,
    copies: ModelCopies,
    is_wrong: Callable[[Sequence[Record]], bool],
    problem: str,
    *,
    rank: int,
    name: str,
    hint: str | None,
) -> NoReturn:
    """Find the steps that cause it, and raise."""

    def try_steps(part: Sequence[Record]) -> TrialOutcome:
        tried = world.attempt(lambda: is_wrong(part))
        if tried.failures:
            return "refused"
        return Failed(problem, "") if any(world.gather(tried.value())) else "agrees"

    path = name.rpartition(".")[0]
    blame = find_steps(copies.schedule.records, try_steps, near=path, tied=copies.tied_modules())
    raise VerifyError(
        f"{problem}\n{blame}",
        tensor=name,
        rank=None if world.is_alone else rank,
        steps=[str(record) for record in blame.records],
        path=path,
        hint=hint,
    )
