"""One line of the schedule as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slapo_core.spec.primitive import Primitive

__all__ = ["Record"]


@dataclass(frozen=True)
class Record:
    """A primitive that was applied.

    Args:
        index: its number in the schedule, from 1.
        primitive: the value that was applied.
        path: where, e.g. ``"encoder.layer.0.output.dense"``.
        distribution: the distribution that provides the primitive, e.g. ``"slapo-tp"``.
        version: that distribution's version, e.g. ``"0.1.0"``.
        location: the user's ``file:line`` that applied it, e.g. ``"bert_tp.py:41"``.
        effects: what it changed, one line an edit; different on every rank, so no part of equality.
    """

    index: int
    primitive: Primitive
    path: str
    distribution: str
    version: str
    location: str = field(default="", compare=False)
    effects: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def name(self) -> str:
        """The primitive's full name, e.g. ``"tp.shard"``."""
        return self.primitive.name

    def __str__(self) -> str:
        where = f"'{self.path}'" if self.path else "the root"
        return f"#{self.index} {self.primitive} at {where}"
