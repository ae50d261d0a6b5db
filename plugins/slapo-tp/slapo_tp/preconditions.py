"""Share preconditions among primitives (paper section 3.5)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from slapo_core.layout import MESH_DIMS
from slapo_core.primitive import Violation

if TYPE_CHECKING:
    from slapo_core import Node

__all__ = ["After", "Distributed", "Divisible"]


class Distributed:
    """Require a mesh with dimension ``mesh_dim``; a size of 1 is enough.

    Args:
        mesh_dim: e.g. ``"tp"``.
    """

    def __init__(self, mesh_dim: str) -> None:
        self.mesh_dim = mesh_dim

    def __call__(self, node: Node) -> Iterator[Violation]:
        call = f'create_schedule(model, mesh={{"{self.mesh_dim}": N}})'
        if node.mesh is None:
            yield Violation(
                f"it is distributed over mesh_dim '{self.mesh_dim}', but the schedule has no mesh",
                f"declare one: {call}",
            )
        elif self.mesh_dim not in node.mesh:
            own = [mesh_dim for mesh_dim in node.mesh.sizes if mesh_dim not in MESH_DIMS]  # of a DeviceMesh
            name = f'name one that it has: mesh_dim="{own[-1]}"; or ' if own else ""
            yield Violation(
                f"it is distributed over mesh_dim '{self.mesh_dim}', but the mesh is {node.mesh}",
                f"{name}add the dimension: {call}, N=1 included",
            )


def needs_mesh(preconditions: Callable[[Any, Node], Iterator[Violation]]) -> Callable[[Any, Node], Iterator[Violation]]:
    """Check the mesh dimension of a primitive before its other preconditions."""

    @functools.wraps(preconditions)
    def checked(self: Any, node: Node) -> Iterator[Violation]:
        yield from list(Distributed(self.mesh_dim)(node)) or preconditions(self, node)

    return checked


class After:
    """Require an earlier step of primitive ``name`` at the node or below.

    Args:
        name: a full or bare primitive name, e.g. ``"tp.shard"``.
        hint: the call to write first, e.g. ``'shard("weight", axis=0)'``.
    """

    def __init__(self, name: str, hint: str) -> None:
        self.name = name
        self.hint = hint

    def __call__(self, node: Node) -> Iterator[Violation]:
        names = {record.name for record in node.records_below()}
        if not names & {self.name} and not any(name.rpartition(".")[2] == self.name for name in names):
            bare = self.name.rpartition(".")[2]
            yield Violation(f"it needs a .{bare}() on this module or below it first", f"write {self.hint} before")


class Divisible:
    """Require that an extent divides evenly over a mesh dimension.

    Args:
        what: the thing measured, e.g. ``"axis 0 of 'weight'"``.
        extent: its size in elements.
        mesh_dim: e.g. ``"tp"``.
        hint: the corrected argument, if there is one.
    """

    def __init__(self, what: str, extent: int, mesh_dim: str, hint: str | None = None) -> None:
        self.what = what
        self.extent = extent
        self.mesh_dim = mesh_dim
        self.hint = hint

    def __call__(self, node: Node) -> Iterator[Violation]:
        size = node.mesh.size(self.mesh_dim) if node.mesh else 1
        if self.extent % size:
            yield Violation(
                f"{self.what} has {self.extent} elements, not divisible by {self.mesh_dim} size {size}", self.hint
            )
