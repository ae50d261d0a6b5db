"""The core of a schedule, for nodes, engines and the other distributions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from slapo_core.errors import ApplyError, SealedError
from slapo_core.plugins import current_registry
from slapo_core.plugins.manager import HookManager
from slapo_core.primitive import Primitive, Record, check_primitive
from slapo_core.schedule.history import History
from slapo_core.schedule.records import caller_location
from slapo_core.schedule.sugar import bound_primitive, bound_query
from slapo_core.schedule.transaction import bound, divided, transact
from slapo_core.tree.tree import Tree

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.plugins.registry import Registry
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.tree.journal import JournalEntry
    from slapo_core.tree.node import Node
    from slapo_core.tree.selection import NodeGroup


class ScheduleCore:
    """The tree, the history, the plugins and the transactions of a schedule.

    Args:
        schedule: whose core it is.
        plugins: distributions whose hooks are active from the start.
        registry: None: the process's own, when it is first asked for.
    """

    def __init__(self, schedule: Schedule, plugins: Sequence[str], registry: Registry | None) -> None:
        self.schedule = schedule
        self.plugins: tuple[str, ...] = tuple(canonicalize_name(name) for name in plugins)
        self.history = History(schedule.model)
        self.sealed_by: str | None = None
        self._registry = registry
        self._hooks: HookManager | None = None
        self.tree = Tree(schedule.model, schedule.mesh, self)

    def start(self, *, guarded: bool) -> None:
        """Activate the plugins that were named, and the guards of a live model."""
        if guarded:
            self.history.guards = tuple(self.registry.each("guards", self._guards))
        for distribution in self.plugins:
            self.hooks.activate(distribution)

    def _guards(self, cls: Any) -> Any:
        guards = cls.of(self.schedule)
        for method in ("follow", "hand_over"):
            if not callable(getattr(guards, method, None)):
                raise TypeError(f"{cls.__qualname__}.of must return an object with {method}() (got {guards!r})")
        return guards

    @property
    def records(self) -> tuple[Record, ...]:
        """The applied steps, oldest first."""
        return self.history.records

    @property
    def registry(self) -> Registry:
        """The plugins of this schedule: those installed when it first asked."""
        if self._registry is None:
            self._registry = current_registry()
        return self._registry

    @property
    def hooks(self) -> HookManager:
        """The hooks of the plugins that this schedule names; for dialects."""
        if self._hooks is None:
            self._hooks = HookManager(self.registry)
        return self._hooks

    def mark_verified(self, passed: bool = True) -> None:
        """Record whether ``verify`` has passed; see ``is_verified``."""
        self.history.cache["verified"] = passed

    def apply_at(
        self,
        node: Node,
        primitive: Primitive,
        *,
        location: str | None = None,
        after_edit: Callable[[int], None] | None = None,
        note: str = "",
    ) -> Node:
        """Apply ``primitive`` at ``node``: see :func:`slapo_core.schedule.transaction.transact`.

        Args:
            node: where.
            primitive: what.
            location: the ``file:line`` to record; None looks for the user's own.
            after_edit: called with the number of edits made so far after each one.
            note: the reason for the step.
        """
        check_primitive(primitive)
        self.check_open(f"apply {primitive}")
        self.history.check_start()
        self.tree.reindex_if_moved(node)
        if not self.history:
            self.tree.tensors.begin()
        try:
            result, step = transact(
                self, node, primitive, location=location or caller_location(), after_edit=after_edit, note=note
            )
        except BaseException:
            self.refresh()
            raise
        self.history.append(step)
        return result

    def bound(self, node: Node, primitive: Primitive) -> Primitive:
        """Locate the primitive's selections at ``node``, and bind it."""
        return bound(primitive, node, self.registry)

    def apply_each(self, nodes: tuple[Node, ...], primitive: Primitive) -> tuple[Node, ...]:
        """Apply ``primitive`` at every node, or, if one refuses, at none."""
        before = len(self.history)
        try:
            return tuple([self.apply_at(node, own) for node, own in divided(primitive, nodes, self.registry)])
        except BaseException:
            if len(self.history) > before:
                self.undo(before)
            raise

    @contextlib.contextmanager
    def rewound(self, to: Record | int) -> Iterator[nn.Module]:
        """Have only the steps up to ``to`` in force for the duration of a ``with`` block: see `Schedule.rewound`."""
        if self.sealed_by is not None:
            self.check_open("go back")
        self.history.check_start()
        edit = self.tree.open_edit
        with (
            edit.set_aside() if edit is not None else contextlib.nullcontext(),
            self.history.rewound(self.history.position(to)),
        ):
            yield self.schedule.model

    def undo(self, to: Record | int | None) -> tuple[Record, ...]:
        """Undo the steps after ``to``: see `Schedule.undo`."""
        self.check_open("undo")
        try:
            return self.history.undo(self.history.position(to))
        finally:
            self.refresh()

    def kept(self, what: str) -> dict[str, Any]:
        """Return a cache about the model, cleared when a step comes or goes; ``what`` is refused while rewound."""
        self.history.check_in_force(what)
        return self.history.cache

    def member_named(self, name: str, target: Node | NodeGroup, where: str) -> Any:
        """Return ``target.<name>``, a query or a primitive; ``where`` is the path or pattern of the target."""
        if self.registry.has("queries", name):
            return bound_query(self.schedule, name, target, where)
        return bound_primitive(self.registry, name, target, where)

    def member_names(self) -> tuple[str, ...]:
        """The queries, bare names and namespaces that nodes know, e.g. ``("find", ..., "shard", ..., "tp")``."""
        registry = self.registry
        names = (*registry.names("queries"), *registry.bare_names("primitives"), *registry.namespaces())
        return tuple(dict.fromkeys(names))

    def plugin_named(self, kind: str, name: str, path: str = "") -> Any:
        """Load what a plugin provides under a name; see :meth:`slapo_core.tree.node.Node.plugin`."""
        return self.registry.load(self.registry.resolve(kind, name, path=path or None))

    def entries(self) -> Iterator[tuple[Record, JournalEntry]]:
        """What each step changed, in order; nothing any more once the originals were dropped."""
        return self.history.entries()

    def removal_of(self, path: str) -> Record | None:
        """The step that removed the module at ``path``; None if none did."""
        return self.history.removal_of(path)

    def refresh(self) -> None:
        """After steps went away: hooks of distributions that no step names any more are switched off."""
        if not self.history:
            self.tree.tensors.forget()
        if self._hooks is not None:
            needed = self.history.distributions.union(self.plugins)
            for distribution in self._hooks.active:
                if distribution not in needed:
                    self._hooks.deactivate(distribution)

    def check_open(self, what: str) -> None:
        if self.sealed_by is not None:
            raise SealedError(
                f"cannot {what}: the schedule was sealed by {self.sealed_by}",
                hint="apply every primitive before build(), or create a new schedule of a fresh model",
            )
        if self.tree.open_edit is not None:
            raise ApplyError(
                f"cannot {what} while a primitive is being applied: the edits would be recorded in another order than "
                "they were made",
                hint="in apply(self, node, edit): OtherPrimitive(...).apply(other_node, edit)",
            )
        self.history.check_in_force(what)
