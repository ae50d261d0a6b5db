"""Several nodes selected by a glob, to iterate or to broadcast a primitive to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self, overload

from slapo_core._vocabulary import OnNodes
from slapo_core.errors import PathError
from slapo_core.tree.select import is_glob, meant_as_regular_expression, refuse_number_ranges

if TYPE_CHECKING:
    from slapo_core.spec.primitive import Primitive


class NodeGroup(OnNodes):
    """Nodes in the model's order; ``group.checkpoint()`` applies to each, all or none.

    Args:
        nodes: at least one.
        pattern: what selected them, e.g. ``"encoder.layer.*"``.
    """

    def __init__(self, nodes: tuple[TreeNode, ...], pattern: str) -> None:
        self.nodes = nodes
        self.pattern = pattern

    def apply(self, primitive: Primitive) -> Self:
        """Apply ``primitive`` at every node; if one refuses, those before it are undone."""
        owner = self.nodes[0]._tree.owner
        return type(self)(tuple(owner.apply_each(self.nodes, primitive)), self.pattern)  # type: ignore[arg-type]

    def find(self, pattern: Any) -> Any:
        """Every place at or below these nodes where a pattern stands: see :meth:`slapo_core.spec.node.Node.find`."""
        return self.nodes[0]._tree.owner.find_at(self.nodes, pattern)

    def __iter__(self) -> Iterator[TreeNode]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    @overload
    def __getitem__(self, key: int) -> TreeNode: ...
    @overload
    def __getitem__(self, key: slice | str) -> NodeGroup: ...
    def __getitem__(self, key: int | slice | str) -> TreeNode | NodeGroup:
        """A node by position, a sub-group by slice, or by path what lies there below every node."""
        if isinstance(key, int):
            return self.nodes[key]
        if isinstance(key, slice):
            selected = self.nodes[key]
            if not selected:
                raise PathError(f"{key} selects none of the {len(self)} nodes of '{self.pattern}'", path=self.pattern)
            return NodeGroup(selected, f"{self.pattern}[{key.start}:{key.stop}]")
        if is_glob(key):
            refuse_number_ranges(key)
        found: dict[str, TreeNode] = {}  # a node that is below several of them counts once
        for node in self.nodes:
            try:
                below = node[key]
            except PathError:
                if is_glob(key):
                    continue  # as in one long glob, some place must match, not every one
                raise
            for each in below if isinstance(below, NodeGroup) else (below,):
                found.setdefault(each.path, each)
        if not found:
            below_first = [each.path.removeprefix(f"{self.nodes[0].path}.") for each in self.nodes[0].walk()][1:]
            glob = meant_as_regular_expression(key, below_first)
            is_expression = ": it is a regular expression, and paths take globs" if glob is not None else ""
            raise PathError(
                f"the pattern '{key}' matches no module below the {len(self)} nodes of '{self.pattern}'{is_expression}",
                path=f"{self.pattern}.{key}",
                hint=glob,
            )
        return NodeGroup(tuple(found.values()), f"{self.pattern}.{key}")

    if not TYPE_CHECKING:  # checkers see those of OnNodes

        def __getattr__(self, name: str) -> Callable[..., Any]:
            if name.startswith("_"):
                raise AttributeError(name)
            return self.nodes[0]._tree.owner.primitive_named(name, self, self.pattern)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.nodes[0]._tree.owner.primitive_names()]

    def __repr__(self) -> str:
        return f"<Group '{self.pattern}': {len(self)} nodes>"


if TYPE_CHECKING:
    from slapo_core.tree.node import TreeNode

    class Selection(TreeNode, NodeGroup):
        """What ``sch[...]`` gives: a node for a path, a group for a glob.

        A type checker cannot tell which, so this type has the members of both.
        """

        @overload  # type: ignore[override]
        def __getitem__(self, key: int) -> TreeNode: ...
        @overload
        def __getitem__(self, key: slice) -> NodeGroup: ...
        @overload
        def __getitem__(self, key: str) -> Selection: ...
        def __getitem__(self, key: Any) -> Any: ...
