"""What a recording saw besides the graph: the values of its nodes, what calls wrote to, which values share memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from slapo_core.graph.structure import children

__all__ = ["Notes", "left"]


def left(path: str) -> None:
    """In a graph with notes: here ends a call of a module that was looked into."""


class Notes:
    """Filled while a module is recorded; it keeps the tensors of that run, so it is thrown away with what it is for.

    Attributes:
        values: of nodes, as far as they are known: tensors (without values, mostly), numbers, containers of such, and
            an ``Opaque`` for any other object.
        writes: for nodes that changed some of their arguments in place: which.
        storages: for nodes that give tensors: a number that those share which lie in the same memory.
        value_reads: how often the run looked into the values of a tensor that is there beside it: of a buffer, say.
        is_real: whether the run was on values.
    """

    def __init__(self) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.writes: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.storages: dict[fx.Node, int] = {}
        self.value_reads = 0
        self.is_real = False

    def versions(self, given: Any) -> list[tuple[torch.Tensor, int]]:
        """The tensors among the arguments of a call, each with how often it was written to."""
        found: list[tuple[torch.Tensor, int]] = []
        _collect(given, found)
        return found

    def note_writes(self, node: fx.Node, written: list[Any]) -> None:
        """After a call: the arguments that it wrote to."""
        if written:
            self.writes[node] = tuple(dict.fromkeys(written))

    def note_storages(self, mode: Any) -> None:
        """At the end of a recording: where the tensors lie; ``mode`` is that of fake tensors, or None."""
        for node, value in self.values.items():
            if isinstance(value, torch.Tensor):
                own = value if mode is None else mode.fake(value)
                self.storages[node] = own.untyped_storage()._cdata


def _collect(value: Any, found: list[tuple[torch.Tensor, int]]) -> None:
    if isinstance(value, torch.Tensor):
        found.append((value, value._version))
        return
    if type(value) is dict:
        value = value.values()
    elif not isinstance(value, tuple | list):
        parts = None if isinstance(value, str | int | float) else children(value)
        if parts is None:
            return
        value = [part for _, _, part in parts]
    for part in value:
        _collect(part, found)
