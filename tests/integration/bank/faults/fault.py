"""One class of mistakes: what it does to a right schedule, and what number that changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.integration.bank.models import MODELS
from tests.integration.bank.steps import Right, Wrong

__all__ = ["Fault", "fault"]


@dataclass(frozen=True)
class Fault:
    """A class of mistakes.

    Args:
        name: e.g. ``"forward sync missing"``.
        breaks: what number changes, and why.
        make: every wrong schedule that the class makes of a right one.
        kinds: the right schedules that it is made of; see :func:`tests.integration.bank.right.base`.
        models: those that it fits.
        at_most: so many cases of each right schedule.
        options: of the models.
        is_users: whether the reference model changes too: what a user changes by hand, outside of any step, is the
            user's own model, and no mistake of the schedule.
    """

    name: str
    breaks: str
    make: Callable[[Right], Iterator[Wrong]]
    kinds: tuple[str, ...] = ("whole",)
    models: tuple[str, ...] = tuple(MODELS)
    at_most: int = 1
    options: tuple[tuple[str, object], ...] = ()
    is_users: bool = False


def fault(
    name: str,
    breaks: str,
    *,
    kinds: Sequence[str] = ("whole",),
    models: Sequence[str] = tuple(MODELS),
    at_most: int = 1,
    **options: object,
) -> Callable[[Callable[[Right], Iterator[Wrong]]], Fault]:
    """Make a :class:`Fault` of the function that makes its cases."""

    def decorate(make: Callable[[Right], Iterator[Wrong]]) -> Fault:
        return Fault(name, breaks, make, tuple(kinds), tuple(models), at_most, tuple(options.items()))

    return decorate
