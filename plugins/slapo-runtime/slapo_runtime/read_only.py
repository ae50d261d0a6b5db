"""Read-only view of a scheduled model's copy, for plugins' hooks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core.errors import ApplyError
from slapo_core.schedule.sugar import bound_query
from slapo_core.tree.node import Node
from slapo_core.tree.tree import Tree, tree_of_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from slapo_core.layout import Mesh
    from slapo_core.plugins.manager import HookManager
    from slapo_core.plugins.registry import Registry
    from slapo_core.primitive import Primitive, Record
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.tree.node import Node


class ScheduledCopy:
    """Implements :class:`slapo_runtime.request.ScheduledModel` for a deep copy of a schedule's model.

    Args:
        schedule: with the steps; its own model is neither returned nor changed.
        model: the copy.
    """

    def __init__(self, schedule: Schedule, model: nn.Module) -> None:
        self._schedule = schedule
        self.model = model

    @property
    def mesh(self) -> Mesh | None:
        return self._schedule.mesh

    @property
    def records(self) -> tuple[Record, ...]:
        return self._schedule.records

    @property
    def registry(self) -> Registry:
        return self._schedule.registry

    @property
    def hooks(self) -> HookManager:
        return self._schedule.hooks

    @property
    def root(self) -> Node:
        return self._tree.node("")

    def __getitem__(self, path: str) -> Any:
        return self._tree.find(path)

    @functools.cached_property
    def _tree(self) -> Tree:
        return tree_of_copy(self.model, self._schedule.tree, self)

    # -- what nodes need --------------------------------------------------------------------------------------

    def records_so_far(self) -> tuple[Record, ...]:
        return self._schedule.records_so_far()

    def removal_of(self, path: str) -> Record | None:
        return self._schedule.removal_of(path)

    def example_call_of(self, path: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._schedule.example_call_of(path)

    def example_calls_of(self, path: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        return self._schedule.example_calls_of(path)

    def rewound(self, to: Any) -> AbstractContextManager[nn.Module]:
        """Rewind the schedule's own model."""
        return self._schedule.rewound(to)

    def plugin_named(self, kind: str, name: str, path: str = "") -> Any:
        return self._schedule.plugin_named(kind, name, path)

    def member_names(self) -> tuple[str, ...]:
        return self._schedule.member_names()

    def member_named(self, name: str, target: Any, where: str) -> Callable[..., Any]:
        if name in self.registry.names("queries"):
            return bound_query(self, name, target, where)
        if name not in self.member_names():
            raise AttributeError(name)
        raise self._is_read(f"apply {name} at '{where}'")

    def apply_at(self, node: Node, primitive: Primitive) -> Node:
        raise self._is_read(f"apply {primitive} at '{node.path}'")

    def apply_each(self, nodes: tuple[Node, ...], primitive: Primitive) -> tuple[Node, ...]:
        raise self._is_read(f"apply {primitive}")

    def find_at(self, nodes: tuple[Node, ...], pattern: Any) -> Any:
        raise self._is_read("find")

    def _is_read(self, what: str) -> ApplyError:
        return ApplyError(f"cannot {what}: this is a read-only copy of the scheduled model")
