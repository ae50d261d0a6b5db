"""A schedule as plain data, so that a mistake is a change of a list."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

import slapo_core as slapo

__all__ = ["Right", "Step", "Wrong", "apply_steps", "step"]


@dataclass(frozen=True)
class Step:
    """One call of a schedule, or an edit of the model that no schedule knows of.

    Args:
        path: of the module; a glob stands for several.
        call: the primitive, e.g. ``"shard"``; ``"outside"`` calls its argument with the live module.
        args: positional arguments.
        kwargs: keyword arguments, as pairs.
        role: what it is for: ``"column"``, ``"row"``, ``"forward"``, ``"backward"``, ``"count"``, ``"norm"``, ...
        part: the pair of split layers that it belongs to, e.g. ``"mlp.0"``.
        ranks: the ranks that make the call; None is all of them.
    """

    path: str
    call: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    role: str = ""
    part: str = ""
    ranks: tuple[int, ...] | None = None

    def with_(self, **changes: Any) -> Step:
        return dataclasses.replace(self, **changes)

    def apply(self, sch: slapo.Schedule) -> None:
        node: Any = sch[self.path] if self.path else sch.root
        if self.call == "outside":
            self.args[0](node.module)
        else:
            getattr(node, self.call)(*self.args, **dict(self.kwargs))

    def __str__(self) -> str:
        given = [*(_short(value) for value in self.args), *(f"{name}={_short(value)}" for name, value in self.kwargs)]
        return f"{self.call}({', '.join(given)}) at '{self.path}'"


def step(path: str, call: str, *args: Any, role: str = "", part: str = "", **kwargs: Any) -> Step:
    """A step, written like the call that it stands for."""
    return Step(path, call, args, tuple(kwargs.items()), role, part)


@dataclass(frozen=True)
class Right:
    """A schedule that keeps the model what it is.

    Args:
        name: e.g. ``"bert/whole"``.
        model: of :mod:`tests.integration.bank.models`.
        steps: in their order.
        ranks: how many it is for.
        options: of the model, e.g. ``{"dtype": "bfloat16"}``.
        form: of the batch, e.g. ``"labels"``.
    """

    name: str
    model: str
    steps: tuple[Step, ...]
    ranks: int = 2
    options: tuple[tuple[str, Any], ...] = ()
    form: str = "labels"

    def where(self, *roles: str) -> Iterator[tuple[int, Step]]:
        """The steps of these roles, with their positions."""
        return ((number, each) for number, each in enumerate(self.steps) if each.role in roles)

    def places(self, part: str) -> tuple[str, ...]:
        """The modules that the steps of a part are at."""
        return tuple(dict.fromkeys(each.path for each in self.steps if each.part == part))

    def without(self, *positions: int) -> tuple[Step, ...]:
        return tuple(each for number, each in enumerate(self.steps) if number not in positions)

    def changed(self, position: int, *instead: Step) -> tuple[Step, ...]:
        """Others in the place of a step."""
        return (*self.steps[:position], *instead, *self.steps[position + 1 :])

    def inserted(self, position: int, *more: Step) -> tuple[Step, ...]:
        return (*self.steps[:position], *more, *self.steps[position:])


@dataclass(frozen=True)
class Wrong:
    """A wrong schedule, and who is to be blamed for it.

    Args:
        right: what it was made of.
        place: where the mistake is, in words.
        steps: of the wrong schedule.
        guilty: the positions of the wrong steps in it; empty where a step is missing.
        near: the modules at which a step may be named where one is missing: those of its pair.
        add: paths and words of calls; that one is suggested in the message is right blame, too.
        by_hand: why it is wrong, where the plain comparison cannot see it; "" leaves it to that.
        alone: it may end or block the processes, so it gets a launch of its own.
        outside: no step is wrong: the model was changed by other code, and saying that is right blame.
        options: of the model, beyond those of ``right``.
        anywhere: the failure cannot be tied to a step, so that only being caught counts.
    """

    right: Right
    place: str
    steps: tuple[Step, ...]
    guilty: tuple[int, ...] = ()
    near: tuple[str, ...] = ()
    add: tuple[tuple[str, str], ...] = ()
    by_hand: str = ""
    alone: bool = False
    outside: bool = False
    anywhere: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    verify: tuple[tuple[str, Any], ...] = ()


def apply_steps(sch: slapo.Schedule, steps: Sequence[Step], rank: int) -> list[range]:
    """Apply steps in their order; the indexes of the records that each of them made.

    Raises:
        SlapoError: a step was refused.
    """
    made = []
    for each in steps:
        before = len(sch.records)
        if each.ranks is None or rank in each.ranks:
            each.apply(sch)
        made.append(range(before, len(sch.records)))
    return made


def in_parts(part: str, steps: Iterable[Step]) -> list[Step]:
    return [each.with_(part=part) for each in steps]


def _short(value: Any) -> str:
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return getattr(value, "__name__", type(value).__name__)
    return repr(value)
