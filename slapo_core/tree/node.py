"""`Node`: one module of the scheduled model, its properties and steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self

from slapo_core._vocabulary import NodePrimitives
from slapo_core.errors import ArgumentError, PathError, place
from slapo_core.layout import Layout
from slapo_core.observers import goes_around
from slapo_core.private import buffers_of, children_of, parameters_of
from slapo_core.tree.forward import FORWARD
from slapo_core.tree.index import full_name, shape_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core.layout import Mesh
    from slapo_core.observers import Forward, HookKind
    from slapo_core.primitive import Primitive, Record
    from slapo_core.tree.selection import NodeOrGroup
    from slapo_core.tree.tree import Tree


class Node(NodePrimitives):
    """One module of the model, addressed by its path.

    ``sch["encoder.layer.0"]`` and ``model.get_submodule("encoder.layer.0")`` are the same place, before and after any
    primitive. Reading is free; changing goes through ``apply``, or inside a primitive through its ``edit``.

    Attributes that are not listed here are primitives: ``node.shard("weight", axis=0)`` is
    ``node.apply(Shard("weight", axis=0))``, and ``node.tp.shard(...)`` names the namespace too.

    Attributes:
        path: from the root, e.g. ``"encoder.layer.0"``; ``""`` for the root.
    """

    __slots__ = ("_generation", "_module", "_tree", "path")

    path: str

    def __init__(self, tree: Tree, path: str) -> None:
        self._tree = tree
        self.path = path
        self._generation = -1
        self._module: nn.Module | None = None

    # -- properties -------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The live module.

        Raises:
            StaleError: a later step removed it; the message names the step.
        """
        tree = self._tree
        if self._generation != tree.generation or self._module is None:
            self._module = tree.module_at(self.path)
            self._generation = tree.generation
        return self._module

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other paths under which the same module is reachable."""
        return tuple(alias for alias, path in self._tree.index.all_aliases.items() if path == self.path)

    @property
    def parent(self) -> Node | None:
        """The node one level up; None for the root."""
        return self._tree.node(self.path.rpartition(".")[0]) if self.path else None

    @property
    def children(self) -> tuple[Node, ...]:
        """The nodes one level down, in the order of registration."""
        return tuple(
            self._tree.node(full_name(self.path, name))
            for name, child in children_of(self.module).items()
            if child is not None
        )

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The module's own parameters by name, without its children's."""
        return {name: tensor for name, tensor in parameters_of(self.module).items() if tensor is not None}

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The module's own buffers by name, without its children's."""
        return {name: tensor for name, tensor in buffers_of(self.module).items() if tensor is not None}

    @property
    def wrappers(self) -> tuple[Callable[[Forward], Forward], ...]:
        """The wrappers of steps around the module's forward, innermost first, the same on a mesh of any size.

        Inactive ones, which have nothing to do on this mesh, are among them; a forward that the user set is not.
        """
        return self._tree.calls.wrappers(self.module)

    @property
    def hooks(self) -> tuple[tuple[HookKind, Callable[..., Any]], ...]:
        """The hooks of steps on the module, each kind in the order of the calls.

        Inactive ones, which have nothing to do on this mesh, are among them; hooks of the user are not, unless a step
        carried them here from a module that it replaced.
        """
        return self._tree.calls.hooks(self.module)

    @property
    def runs_own_forward(self) -> bool:
        """Whether calls run the forward of the module's class.

        What steps wrapped and is not active on this mesh counts too: a schedule is refused on every mesh, or on none.
        """
        forward = self.module.__dict__.get("forward")
        is_set = forward is not None and getattr(forward, "has_own", True)
        return not self.forward_is_replaced and not is_set and all(map(goes_around, self.wrappers))

    @property
    def forward_is_replaced(self) -> bool:
        """Whether a step replaced the module's forward."""
        return FORWARD in self.state

    @property
    def state(self) -> Mapping[str, Any]:
        """The values that primitives keep for the module (``edit.set_state``); ``"forward"``: a forward they set."""
        return self._tree.calls.state(self.module)

    @property
    def schedule(self) -> Any:
        """The schedule that the node belongs to."""
        return self._tree.owner.schedule

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the schedule was made for; None without one."""
        return self._tree.mesh

    @property
    def records(self) -> tuple[Record, ...]:
        """The records of the steps applied exactly here, oldest first."""
        return tuple(record for record in self._tree.owner.records if record.path == self.path)

    def records_below(self) -> tuple[Record, ...]:
        """The records of the steps applied here or at any descendant, oldest first."""
        prefix = f"{self.path}." if self.path else ""
        return tuple(
            record for record in self._tree.owner.records if record.path == self.path or record.path.startswith(prefix)
        )

    @property
    def changed_attributes(self) -> frozenset[str]:
        """The plain attributes of the present module that steps have set, e.g. ``{"num_heads"}``."""
        module = self.module
        return frozenset(name for owner, name in self._tree.attributes if owner is module)

    def layout(self, name: str) -> Layout:
        """The layout of an own parameter or buffer; a replica of itself where no step changed it.

        Args:
            name: e.g. ``"weight"``.

        Raises:
            PathError: the module has none of that name.
        """
        return self._tree.tensors.layout(self._tensor(name), full_name(self.path, name))

    def ties(self, name: str) -> tuple[str, ...]:
        """Full names of every place that holds the same parameter object, this one included.

        Args:
            name: of an own parameter or buffer, e.g. ``"weight"``.

        Raises:
            PathError: the module has none of that name.
        """
        return tuple(full_name(*site) for site in self._tree.sites.of(self._tensor(name)))

    def _tensor(self, name: str) -> torch.Tensor:
        module = self.module
        tensor: torch.Tensor | None = parameters_of(module).get(name)
        if tensor is None:
            tensor = buffers_of(module).get(name)
        if tensor is None:
            tensors = {**parameters_of(module), **buffers_of(module)}
            raise PathError(
                f"{place(self.path)} has no parameter or buffer '{name}'",
                path=self.path,
                hint=f"it has {', '.join(name for name, t in tensors.items() if t is not None) or 'none'}",
            )
        return tensor

    @contextlib.contextmanager
    def reference(self, to: int = 0) -> Iterator[nn.Module]:
        """The module that stood here before the first step, for the duration of a ``with`` block: see Schedule.

        Args:
            to: or the one that stood here just after this many steps.

        Raises:
            PathError: a step brought the place.
            SealedError: the originals were dropped.
        """
        with self._tree.owner.rewound(to) as model:
            try:
                module = model.get_submodule(self.path)
            except AttributeError:
                what = f"the model after step {to}" if to else "the reference model"
                raise PathError(f"{what} has nothing at '{self.path}'", path=self.path) from None
            yield module

    def plugin(self, kind: str, name: str) -> Any:
        """Load the class that a plugin provides under a name, through the schedule's registry.

        Args:
            kind: e.g. ``"tracers"``.
            name: e.g. ``"record"``.

        Raises:
            PluginError: nothing that is installed and usable provides it; the message says what to do.
        """
        return self._tree.owner.plugin_named(kind, name, self.path)

    def walk(self) -> Iterator[Node]:
        """This node and all its descendants, parents first."""
        if not self.path:
            yield from map(self._tree.node, list(self._tree.index.modules))
            return
        stack = [self.path]
        while stack:
            path = stack.pop()
            node = self._tree.node(path)
            yield node
            modules = self._tree.index.modules
            below = [full_name(path, name) for name, child in children_of(node.module).items() if child is not None]
            stack.extend(child for child in reversed(below) if child in modules)

    # -- doing ------------------------------------------------------------------------------------------------

    def apply(self, primitive: Primitive) -> Self:
        """Apply a primitive here; the returned node is the one on which a chained call continues.

        ``node.shard("weight", axis=0)`` is short for ``node.apply(Shard("weight", axis=0))``.

        Raises:
            PreconditionError: a precondition is not met; the model is unchanged.
            ApplyError: the step failed halfway; the model is as it was before.
            PostconditionError: it took no effect, and was taken back.
            SealedError: the schedule was built or sealed.
        """
        return self._tree.owner.apply_at(self, primitive)  # type: ignore[return-value]

    def __getitem__(self, path: str | int) -> NodeOrGroup:
        """The node at ``path`` below this one, or the group of nodes that a glob selects; ``0`` is the child ``"0"``.

        Raises:
            PathError: nothing is there; close matches are named.
            ArgumentError: the path is not a string.
        """
        return self._tree.find(self._below(path))  # type: ignore[return-value]

    def __contains__(self, path: str | int) -> bool:
        """Whether ``node[path]`` is there."""
        return self._tree.has(self._below(path))

    def _ipython_key_completions_(self) -> list[str]:
        start = f"{self.path}." if self.path else ""
        return [path[len(start) :] for path in self._tree.index.modules if path and path.startswith(start)]

    def _below(self, path: str | int) -> str:
        if not isinstance(path, (str, int)):
            hint = f"sch['{full_name(self.path, '*')}'][1:3]" if isinstance(path, slice) else 'node["dense"]'
            raise ArgumentError(f"a path must be a string (got {path!r})", path=self.path, hint=hint)
        return full_name(self.path, str(path)) if path != "" else self.path

    if not TYPE_CHECKING:  # checkers see NodePrimitives, and that a group is iterated

        def __iter__(self) -> NoReturn:
            where = f"sch['{self.path}']" if self.path else "sch.root"
            raise ArgumentError(
                f"{where} is one node", path=self.path, hint=f"for node in {where}.children: ..., or {where}.walk()"
            )

        def __getattr__(self, name: str) -> Callable[..., Any]:
            if name.startswith("_"):
                raise AttributeError(name)
            return self._tree.owner.member_named(name, self, self.path)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._tree.owner.member_names()]

    def __repr__(self) -> str:
        module = self._tree.index.modules.get(self.path)
        kind = type(module).__name__ if module is not None else "gone"
        own = ", ".join(f"{name} {shape_of(t)}" for name, t in self.parameters.items()) if module is not None else ""
        return f"<Node '{self.path}': {kind}{f', {own}' if own else ''}>"
