"""The tree of a copy of a scheduled model: other modules and tensors, and all that steps said about the original's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core.tree.calls import Calls
from slapo_core.tree.tensors import TensorTable
from slapo_core.tree.tree import Owner, Tree

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from slapo_core.spec.edit import Forward, HookKind
    from slapo_core.spec.graph import Graph
    from slapo_core.spec.layout import Layout


def tree_of_copy(copy: nn.Module, original: Tree, owner: Owner) -> Tree:
    """A tree to read: its nodes have the copy's modules and tensors, and the original's layouts, hooks and graphs.

    Args:
        copy: a deep copy of the original's root.
        original: as it is now; what later steps change is not followed.
        owner: of the nodes.
    """
    tree = Tree(copy, original.mesh, owner)
    tree.calls = _CallsOfCopy(tree, original)
    tree.tensors = _TensorsOfCopy(tree, original)
    paths = ((original.index.path_of(module), name) for module, name in original.attributes)
    modules = tree.index.modules
    tree.attributes = [(modules[path], name) for path, name in paths if path is not None and path in modules]
    return tree


class _CallsOfCopy(Calls):
    def __init__(self, tree: Tree, original: Tree) -> None:
        super().__init__()
        self._tree, self._original = tree, original

    def wrappers(self, module: nn.Module) -> tuple[Callable[[Forward], Forward], ...]:
        return self._original.calls.wrappers(self._other(module))

    def hooks(self, module: nn.Module) -> tuple[tuple[HookKind, Callable[..., Any]], ...]:
        return self._original.calls.hooks(self._other(module))

    def graph(self, module: nn.Module) -> Graph | None:
        return self._original.calls.graph(self._other(module))

    def _other(self, module: nn.Module) -> nn.Module:
        path = self._tree.index.path_of(module)
        return self._original.index.modules.get(path, module) if path is not None else module


class _TensorsOfCopy(TensorTable):
    def __init__(self, tree: Tree, original: Tree) -> None:
        super().__init__(tree)
        self._original = original
        self.dropped = original.tensors.dropped
        self.trained, self.trained_at_first = original.tensors.trained, original.tensors.trained_at_first

    def layout(self, tensor: torch.Tensor, name: str) -> Layout:
        other = self._original.index.tensor_at(name)
        return self._original.tensors.layout(tensor if other is None else other, name)
