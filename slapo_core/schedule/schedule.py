"""`Schedule`: the steps that say how a model runs, applied to the live model and kept as data."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name
from torch import nn

from slapo_core._vocabulary import OnRoot
from slapo_core.errors import ApplyError, ArgumentError, SealedError
from slapo_core.layout import Mesh
from slapo_core.plugins import current_registry
from slapo_core.plugins.manager import HookManager
from slapo_core.primitive import Primitive, Record, check_primitive
from slapo_core.schedule.history import History
from slapo_core.schedule.records import caller_location, dump_records, fingerprint
from slapo_core.schedule.sugar import bound_primitive, bound_query
from slapo_core.schedule.transaction import Transaction, bound, divided
from slapo_core.tree.node import Node
from slapo_core.tree.render import explain_records, render_tree
from slapo_core.tree.selection import NodeGroup
from slapo_core.tree.tree import Tree

if TYPE_CHECKING:
    from slapo_core.plugins.registry import Registry
    from slapo_core.tree.journal import Entry
    from slapo_core.tree.node import Node
    from slapo_core.tree.selection import Selection


class Schedule(OnRoot):
    """How one model runs; made by :func:`slapo_core.create_schedule`.

    ``sch["encoder.layer.0"]`` is a node, ``sch["encoder.layer.*"]`` a group; primitives are applied there and change
    the model at once. Attributes that are not listed here are primitives applied at the root.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mesh: Mesh | None = None,
        plugins: Sequence[str] = (),
        example_inputs: Any = None,
        registry: Registry | None = None,
        guarded: bool = False,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.example_inputs = example_inputs
        self.plugins: tuple[str, ...] = tuple(canonicalize_name(name) for name in plugins)
        self._registry = registry
        self._hooks: HookManager | None = None
        self._history = History(model)
        self._sealed_by: str | None = None
        self.estimates: dict[bytes, Any] = {}  # of fit, by steps and arguments
        self.tree = Tree(model, mesh, self)
        if guarded:
            names = self.registry.names("guards")
            self._history.guards = tuple(self.registry.load(name, "guards").of(self) for name in names)
        for distribution in self.plugins:
            self.hooks.activate(distribution)

    # -- the tree ---------------------------------------------------------------------------------------------

    def __getitem__(self, path: str) -> Selection:
        """The node at a path, or the group that a glob selects.

        Args:
            path: as of ``model.get_submodule``, e.g. ``"encoder.layer.0"``. ``*`` matches anything within one level,
                ``**`` for any number of levels, ``?`` for one character and ``[03]`` for one of these; for a range of
                numbers take a slice, ``sch["encoder.layer.*"][4:12]``.

        Raises:
            PathError: nothing is there; close matches are named.
            ArgumentError: the path is not a string.
        """
        if not isinstance(path, str):
            raise ArgumentError(f"a path must be a string (got {path!r})", hint='sch["encoder.layer.0"]')
        return self.tree.find(path)  # type: ignore[return-value]

    @property
    def root(self) -> Node:
        """The node of the model itself, whose path is ``""``."""
        return self.tree.node("")

    if not TYPE_CHECKING:  # checkers see those of OnRoot

        def __getattr__(self, name: str) -> Callable[..., Any]:
            if name.startswith("_") or "tree" not in self.__dict__:  # in the middle of __init__, or before it
                raise AttributeError(name)
            return self.member_named(name, self.root, "")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.member_names()]

    def __str__(self) -> str:
        """Draw the module tree, repeated layers folded, with the steps at each module."""
        return render_tree(self.tree, self.records)

    def __repr__(self) -> str:
        mesh = f", mesh={self.mesh}" if self.mesh else ""
        return f"<Schedule of {type(self.model).__name__}: {len(self._history)} steps{mesh}>"

    # -- the steps --------------------------------------------------------------------------------------------

    def apply(self, primitive: Primitive) -> Node:
        """Apply a primitive at the root of the model: ``sch.root.apply``."""
        return self.root.apply(primitive)

    @property
    def records(self) -> tuple[Record, ...]:
        """The applied steps, oldest first."""
        return self._history.records

    def undo(self, *, to: Record | int | None = None) -> tuple[Record, ...]:
        """Undo the last step, or every step after ``to``.

        Args:
            to: the record (or its index) that remains the last; 0 takes everything back.

        Returns:
            the records taken back, latest first.

        Raises:
            UndoError: the schedule has no such step.
            SealedError: the originals were dropped by ``build`` or ``seal``.
        """
        self._check_open("undo")
        try:
            return self._history.undo(self._history.position(to))
        finally:
            self._refresh()

    def seal(self, by: str = "seal()") -> None:
        """End the schedule: no more steps, no undo; the originals that undo needed are dropped (by ``by``)."""
        if not self.is_sealed:
            self._check_open("seal")
        self._sealed_by = self._sealed_by or by
        if by != "seal()":
            for guards in self._history.guards:
                guards.hand_over()
        self._history.drop_originals()
        self.tree.tensors.seal()
        self.tree.attributes.clear()

    @property
    def is_sealed(self) -> bool:
        """Whether ``build`` or ``seal`` ended the schedule."""
        return self._sealed_by is not None

    @property
    def is_verified(self) -> bool:
        """Whether :func:`verify` has passed these steps on this mesh; a further step or ``undo`` resets it.

        A saved schedule keeps it. :func:`replay` restores it where the class of the model, the mesh sizes and the
        versions of slapo-core and of the plugins are the same.
        """
        return bool(self._history.kept.get("verified"))

    @contextlib.contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """The model as it was before the first step, for the duration of a ``with`` block.

        The very same objects come back, in both directions; copy the model to keep it.

        Raises:
            SealedError: the originals were dropped.
        """
        with self.rewound(0) as model:
            yield model

    @contextlib.contextmanager
    def rewound(self, to: Record | int) -> Iterator[nn.Module]:
        """The model as it was just after step ``to`` (0: before the first), for the duration of a ``with`` block.

        Args:
            to: the step, or its index.

        Raises:
            UndoError: the schedule has no such step.
            SealedError: the originals were dropped.
            ArgumentError: the model, without steps of this schedule, carries those of another one.
        """
        if self.is_sealed:
            self._check_open("go back")
        self._history.check_start()
        edit = self.tree.open_edit
        with (
            edit.set_aside() if edit is not None else contextlib.nullcontext(),
            self._history.rewound(self._history.position(to)),
        ):
            yield self.model

    # -- as data ----------------------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """The schedule as plain data, which :func:`replay` takes; see :meth:`to_json`.

        ``"verified"`` is in it where ``is_verified`` is true.
        """
        document = dump_records(
            self.records,
            model=self.model,
            mesh=self.mesh.sizes if self.mesh else None,
            registry=self.registry,
        )
        return {**document, "verified": fingerprint(document)} if self.is_verified else document

    def to_json(self) -> str:
        """The schedule as JSON, for :func:`replay`.

        Raises:
            SerializationError: a step holds a lambda or a live object.
        """
        return json.dumps(self.document(), indent=2)

    def explain(self) -> str:
        """What each step changed, steps that did the same in repeated layers folded."""
        from slapo_core.schedule.mesh_dims import unused_mesh_dims

        unused = [
            f"mesh_dim '{mesh_dim}' ({self.mesh.size(mesh_dim)} ranks) is used by no step: its ranks do the same work"
            for mesh_dim in unused_mesh_dims(self)
            if self.mesh is not None
        ]
        return "\n".join([explain_records(self.records), *unused])

    # -- what nodes and engines need --------------------------------------------------------------------------

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
        self._history.kept["verified"] = passed

    def apply_at(
        self,
        node: Node,
        primitive: Primitive,
        *,
        location: str | None = None,
        after_edit: Callable[[int], None] | None = None,
    ) -> Node:
        """Apply ``primitive`` at ``node``: see :class:`slapo_core.schedule.transaction.Transaction`.

        Args:
            node: where.
            primitive: what.
            location: the ``file:line`` to record; None looks for the user's own.
            after_edit: called with the number of edits made so far after each one.
        """
        check_primitive(primitive)
        self._check_open(f"apply {primitive}")
        self._history.check_start()
        self.tree.look_again_if_changed(node)
        if not self._history:
            self.tree.tensors.begin()
        transaction = Transaction(
            self.tree,
            ask=self.hooks.call_each,
            admit=self._admit,
            bind=self.bound,
            after_edit=after_edit,
        )
        try:
            result, step = transaction.run(
                node, primitive, index=len(self._history) + 1, location=location or caller_location()
            )
        except BaseException:
            self._refresh()
            raise
        self._history.append(step)
        return result

    def _admit(self, primitive: Primitive) -> tuple[str, str]:
        """Return the primitive's provider, whose plugin must be usable, and activate its hooks."""
        provider = self.registry.provider(primitive)
        self.hooks.activate(provider[0], version=provider[1])
        return provider

    def bound(self, node: Node, primitive: Primitive) -> Primitive:
        """Locate the primitive's selections at ``node``, and bind it."""
        return bound(primitive, self.tree.node(node.path), self.registry)

    def apply_each(self, nodes: tuple[Node, ...], primitive: Primitive) -> tuple[Node, ...]:
        """Apply ``primitive`` at every node, or, if one refuses, at none."""
        before = len(self._history)
        try:
            return tuple([self.apply_at(node, own) for node, own in divided(primitive, nodes, self.registry)])
        except BaseException:
            if len(self._history) > before:
                self.undo(to=before)
            raise

    def kept(self, what: str) -> dict[str, Any]:
        """Return a cache about the model, cleared when a step comes or goes; ``what`` is refused while rewound."""
        self._history.check_in_force(what)
        return self._history.kept

    def member_named(self, name: str, target: Node | NodeGroup, where: str) -> Any:
        """Return ``target.<name>``, a query or a primitive; ``where`` is the path or pattern of the target."""
        if name in self.registry.names("queries"):
            return bound_query(self, name, target, where)
        return bound_primitive(self.registry, name, target, where)

    def member_names(self) -> tuple[str, ...]:
        """The queries, bare names and namespaces that nodes know, e.g. ``("find", ..., "shard", ..., "tp")``."""
        registry = self.registry
        return (*registry.names("queries"), *registry.bare_names("primitives"), *registry.namespaces())

    def plugin_named(self, kind: str, name: str, path: str = "") -> Any:
        """Load what a plugin provides under a name; see :meth:`slapo_core.tree.node.Node.plugin`."""
        return self.registry.load(self.registry.resolve(kind, name, path=path or None))

    def entries(self) -> Iterator[tuple[Record, Entry]]:
        """What each step changed, in order; nothing any more once the originals were dropped."""
        return self._history.entries()

    def removal_of(self, path: str) -> Record | None:
        """The step that removed the module at ``path``; None if none did."""
        return self._history.removal_of(path)

    def _refresh(self) -> None:
        """After steps went away: hooks of distributions that no step names any more are switched off."""
        if not self._history:
            self.tree.tensors.forget()
        if self._hooks is not None:
            needed = self._history.distributions.union(self.plugins)
            for distribution in self._hooks.active:
                if distribution not in needed:
                    self._hooks.deactivate(distribution)

    def forget_target(self) -> None:
        """After a failed build: the hooks of its dialect are switched off, unless a step names the distribution."""
        self._refresh()

    def _check_open(self, what: str) -> None:
        if self._sealed_by is not None:
            raise SealedError(
                f"cannot {what}: the schedule was sealed by {self._sealed_by}",
                hint="apply every primitive before build(), or create a new schedule of a fresh model",
            )
        if self.tree.open_edit is not None:
            raise ApplyError(
                f"cannot {what} while a primitive is being applied: the edits would be recorded in another order than "
                "they were made",
                hint="in apply(self, node, edit): OtherPrimitive(...).apply(other_node, edit)",
            )
        self._history.check_in_force(what)
