"""The interface of slapo-core to the project's other distributions, besides its public names; not a public interface.

`Internals` is what they use of a schedule; the other names are types and functions that come with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from slapo_core.plugins.manager import HookManager
from slapo_core.primitives.annotate import Annotate
from slapo_core.primitives.checkpoint import Checkpoint, checkpoints
from slapo_core.primitives.replace import Replace
from slapo_core.primitives.replacement import named_tensors, set_mode, set_tensor, type_of
from slapo_core.private import (
    SafeFakeTensorMode,
    buffers_of,
    children_of,
    hooks_of,
    is_data_pointer_error,
    module_calls_through,
    parameters_of,
    plain_calls_within,
)
from slapo_core.schedule.mesh_dims import sharded_mesh_dims, unused_mesh_dims
from slapo_core.schedule.records import (
    Codec,
    caller_location,
    find_function,
    primitive_from_json,
    primitive_to_json,
)
from slapo_core.schedule.scheduled_copy import ScheduledCopy
from slapo_core.schedule.scheduled_models import has_steps
from slapo_core.schedule.transaction import Step
from slapo_core.tree import copies, forward as forwards, index as module_index, journal
from slapo_core.tree.edit import Edit
from slapo_core.tree.render import describe, fold_numbers, fold_paths
from slapo_core.tree.selection import matching
from slapo_core.tree.tree import Tree

if TYPE_CHECKING:
    from slapo_core.plugins import Registry
    from slapo_core.primitive import Primitive, Record
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.tree.node import Node

__all__ = [
    "Annotate",
    "Checkpoint",
    "Codec",
    "HookManager",
    "Internals",
    "Replace",
    "SafeFakeTensorMode",
    "ScheduledCopy",
    "Step",
    "Tree",
    "buffers_of",
    "caller_location",
    "checkpoints",
    "children_of",
    "copies",
    "describe",
    "find_function",
    "fold_numbers",
    "fold_paths",
    "forwards",
    "has_steps",
    "hooks_of",
    "is_data_pointer_error",
    "journal",
    "matching",
    "module_calls_through",
    "module_index",
    "named_tensors",
    "parameters_of",
    "plain_calls_within",
    "primitive_from_json",
    "primitive_to_json",
    "set_mode",
    "set_tensor",
    "sharded_mesh_dims",
    "type_of",
    "unused_mesh_dims",
]


class Internals:
    """The tree, plugins, history and transactions of one schedule.

    Args:
        schedule: whose internals these are; nothing is copied.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._core = schedule._core

    # -- the tree ---------------------------------------------------------------------------------------------

    @property
    def tree(self) -> Tree:
        """Nodes, calls and tensors by path: ``tree.tensors`` has the layout of every live tensor."""
        return self._core.tree

    def node(self, path: str) -> Node:
        """Return the node at a path, never a group.

        Raises:
            PathError: the model has no module there.
        """
        return self._core.tree.node(path)

    def edit(self) -> Edit:
        """Make an edit outside of a step, for a runtime that replaces the tensors of a sealed schedule."""
        return Edit(self._core.tree)

    # -- the plugins ------------------------------------------------------------------------------------------

    @property
    def plugins(self) -> tuple[str, ...]:
        """The distributions that were named at ``create_schedule``."""
        return self._core.plugins

    @property
    def registry(self) -> Registry:
        """The plugins that the schedule knows."""
        return self._core.registry

    @property
    def hooks(self) -> HookManager:
        """The active hooks: of the distributions that were named, and of those that provide a step."""
        return self._core.hooks

    # -- the steps --------------------------------------------------------------------------------------------

    def apply(
        self,
        node: Node,
        primitive: Primitive,
        *,
        location: str | None = None,
        after_edit: Callable[[int], None] | None = None,
        note: str = "",
    ) -> Node:
        """Apply a primitive at a node, as ``node.apply(primitive)`` does.

        Args:
            node: of this schedule.
            primitive: the value to apply.
            location: the ``file:line`` to record; None for the caller's own.
            after_edit: called with the number of edits made so far after each one.
            note: the reason for the step, which ``sch.explain()`` shows.

        Returns:
            The node of the path, whose module may be another one.
        """
        return self._core.apply_at(node, primitive, location=location, after_edit=after_edit, note=note)

    def repeat(self, step: Record) -> Node:
        """Apply the primitive of a step, of another schedule or of this one, at the node of its path."""
        return self.apply(self.node(step.path), step.primitive, location=step.location or None)

    def bound(self, node: Node, primitive: Primitive) -> Primitive:
        """Locate the primitive's selections at ``node``, and bind it."""
        return self._core.bound(node, primitive)

    def entries(self) -> Iterator[tuple[Record, journal.JournalEntry]]:
        """Yield each change with its step, oldest first; none after the originals were dropped."""
        return self._core.entries()

    @property
    def is_rewound(self) -> bool:
        """Whether a block of ``sch.reference()`` or ``sch.rewound()`` is open."""
        return self._core.history.in_force is not None

    def cache(self, what: str) -> dict[str, Any]:
        """Return a dict that is cleared when a step is applied or undone.

        Args:
            what: the caller's action, for the error.

        Raises:
            ArgumentError: a block of ``sch.reference()`` or ``sch.rewound()`` is open.
        """
        return self._core.kept(what)

    def mark_verified(self, passed: bool = True) -> None:
        """Record whether ``verify`` has passed; see ``Schedule.is_verified``."""
        self._core.mark_verified(passed)

    def refresh_hooks(self) -> None:
        """Deactivate the hooks of distributions that neither a step nor ``create_schedule`` names."""
        self._core.refresh()
