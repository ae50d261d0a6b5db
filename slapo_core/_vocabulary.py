"""Primitives for type checkers: any name; ``slapo stubs`` lists the installed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any


class NodePrimitives:
    """The primitives of a node or a group."""

    __slots__ = ()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


class SchedulePrimitives(NodePrimitives):
    """The primitives of a schedule, applied at the root."""
