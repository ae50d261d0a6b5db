"""`TreeNode`: a path in the live tree, with its properties and steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from slapo_core._vocabulary import OnNodes
from slapo_core.errors import PathError
from slapo_core.layout import Layout
from slapo_core.private import buffers_of, children_of, parameters_of
from slapo_core.tree.index import full_name, shape_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core.edit import Forward, HookKind
    from slapo_core.mesh import Mesh
    from slapo_core.primitive import Primitive, Record
    from slapo_core.tree.selection import Selection
    from slapo_core.tree.tree import Tree
    from slapo_graph.match import Graph


class TreeNode(OnNodes):
    """The implementation of :class:`slapo_core.node.Node`; made by ``sch["path"]``.

    Attributes that are not listed here are primitives: ``node.shard("weight", axis=0)`` is
    ``node.apply(Shard("weight", axis=0))``, and ``node.tp.shard(...)`` names the namespace too.
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
        tree = self._tree
        if self._generation != tree.generation or self._module is None:
            self._module = tree.module_at(self.path)
            self._generation = tree.generation
        return self._module

    @property
    def name(self) -> str:
        """The last level of the path: ``"query"`` of ``"attention.self.query"``."""
        return self.path.rpartition(".")[2]

    @property
    def aliases(self) -> tuple[str, ...]:
        return tuple(alias for alias, path in self._tree.index.all_aliases.items() if path == self.path)

    @property
    def parent(self) -> TreeNode | None:
        return self._tree.node(self.path.rpartition(".")[0]) if self.path else None

    @property
    def children(self) -> tuple[TreeNode, ...]:
        return tuple(
            self._tree.node(full_name(self.path, name))
            for name, child in children_of(self.module).items()
            if child is not None
        )

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return {name: tensor for name, tensor in parameters_of(self.module).items() if tensor is not None}

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor for name, tensor in buffers_of(self.module).items() if tensor is not None}

    @property
    def wrappers(self) -> tuple[Callable[[Forward], Forward], ...]:
        return self._tree.calls.wrappers(self.module)

    @property
    def hooks(self) -> tuple[tuple[HookKind, Callable[..., Any]], ...]:
        return self._tree.calls.hooks(self.module)

    @property
    def is_traced(self) -> bool:
        """Whether a static graph runs as its forward."""
        return self._tree.calls.graph(self.module) is not None

    @property
    def graph(self) -> Graph | None:
        graph = self._tree.calls.graph(self.module)
        if graph is not None:
            graph.look(self.module)
        return graph

    @property
    def mesh(self) -> Mesh | None:
        return self._tree.mesh

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(record for record in self._tree.owner.records_so_far() if record.path == self.path)

    def records_below(self) -> tuple[Record, ...]:
        prefix = f"{self.path}." if self.path else ""
        return tuple(
            record
            for record in self._tree.owner.records_so_far()
            if record.path == self.path or record.path.startswith(prefix)
        )

    @property
    def changed_attributes(self) -> frozenset[str]:
        module = self.module
        return frozenset(name for owner, name in self._tree.attributes if owner is module)

    def layout(self, name: str) -> Layout:
        return self._tree.tensors.layout(self._tensor(name), full_name(self.path, name))

    def ties(self, name: str) -> tuple[str, ...]:
        return tuple(full_name(*site) for site in self._tree.sites.of(self._tensor(name)))

    def _tensor(self, name: str) -> torch.Tensor:
        tensors = {**parameters_of(self.module), **buffers_of(self.module)}
        tensor = tensors.get(name)
        if tensor is None:
            where = f"'{self.path}'" if self.path else "the root"
            raise PathError(
                f"{where} has no parameter or buffer '{name}'",
                path=self.path,
                hint=f"it has {', '.join(name for name, t in tensors.items() if t is not None) or 'none'}",
            )
        return tensor

    def example_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._tree.owner.example_call_of(self.path)

    def example_calls(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        return self._tree.owner.example_calls_of(self.path)

    @contextlib.contextmanager
    def reference(self, to: int = 0) -> Iterator[nn.Module]:
        with self._tree.owner.rewound(to) as model:
            try:
                module = model.get_submodule(self.path)
            except AttributeError:
                what = f"the model after step {to}" if to else "the reference model"
                raise PathError(f"{what} has nothing at '{self.path}'", path=self.path) from None
            yield module

    def plugin(self, kind: str, name: str) -> Any:
        return self._tree.owner.plugin_named(kind, name, self.path)

    def walk(self) -> Iterator[TreeNode]:
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

    def find(self, pattern: Any) -> Any:
        return self._tree.owner.find_at((self,), pattern)

    # -- doing ------------------------------------------------------------------------------------------------

    def apply(self, primitive: Primitive) -> Self:
        return self._tree.owner.apply_at(self, primitive)  # type: ignore[return-value]

    def __getitem__(self, path: str) -> Selection:
        return self._tree.find(full_name(self.path, path) if path else self.path)  # type: ignore[return-value]

    if not TYPE_CHECKING:  # checkers see those of OnNodes

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
