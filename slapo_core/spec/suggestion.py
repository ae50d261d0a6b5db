"""What else could be written: for ``verify`` to try when a schedule is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slapo_core.spec.primitive import Primitive
    from slapo_core.spec.record import Record

__all__ = ["Change", "Suggestion"]


@dataclass(frozen=True)
class Change:
    """One step more, another one in the place of a step, or a step less.

    Args:
        path: where, e.g. ``"encoder.layer.0.output.dense"``.
        primitive: what is applied there; None leaves ``instead_of`` out.
        instead_of: the step whose place it takes; None adds a step.
        first: of an added step: whether it goes before the other steps at this module, and not behind all steps.
    """

    path: str
    primitive: Primitive | None = None
    instead_of: Record | None = None
    first: bool = False

    def __str__(self) -> str:
        where = f"sch['{self.path}']" if self.path else "sch.root"
        if self.instead_of is None:
            return f"add {where}.{self.primitive}"
        if self.primitive is None:
            return f"leave {self.instead_of} out"
        return f"write {where}.{self.primitive} in place of #{self.instead_of.index}"


@dataclass(frozen=True)
class Suggestion:
    """Changes that belong together.

    Args:
        changes: all of them are tried at once.
        likely: whether it is worth a trial before anything is known about the place of the mistake.
    """

    changes: tuple[Change, ...]
    likely: bool = False

    def __str__(self) -> str:
        return "; ".join(map(str, self.changes))
