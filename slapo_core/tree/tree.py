"""The module tree of one model: nodes on demand, layouts, paths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from slapo_core.errors import ApplyError, ArgumentError, PathError, StaleError
from slapo_core.private import children_of
from slapo_core.tree.forward import CallTable
from slapo_core.tree.index import ModuleIndex, TensorSites
from slapo_core.tree.node import Node
from slapo_core.tree.selection import (
    NodeGroup,
    close_paths,
    close_patterns,
    is_glob,
    matching,
    meant_as_regular_expression,
)
from slapo_core.tree.tensors import TensorTable

if TYPE_CHECKING:
    import torch

    from slapo_core.layout import Layout, Mesh
    from slapo_core.schedule.core import ScheduleCore
    from slapo_core.tree.edit import Edit


class Tree:
    """The live tree under ``root``.

    Args:
        root: the model; it is never copied.
        mesh: the mesh of the schedule, or None.
        owner: the core of the schedule.
    """

    def __init__(self, root: nn.Module, mesh: Mesh | None, owner: ScheduleCore) -> None:
        self.root, self.mesh, self.owner = root, mesh, owner
        self.generation = 0
        self._index: ModuleIndex | None = ModuleIndex(root)
        self._sites: TensorSites | None = None
        self._former_sites: TensorSites | None = None
        self._nodes: dict[str, Node] = {}
        self.tensors = TensorTable(self)
        self.calls = CallTable()
        self.open_edit: Edit | None = None  # of the primitive that is being applied
        self.attributes: list[tuple[nn.Module, str]] = []  # those that steps have set, on the modules that they saw

    @property
    def index(self) -> ModuleIndex:
        if self._index is None:
            self._index = ModuleIndex(self.root)
        return self._index

    @property
    def sites(self) -> TensorSites:
        if self._sites is None:
            self._sites = TensorSites(self.index)
        return self._sites

    def structure_changed(self) -> None:
        """Forget the index of modules; nodes look again."""
        self.generation += 1
        self._former_sites = self._sites or self._former_sites
        self._index = self._sites = None

    def forget_former_tensors(self) -> None:
        """Index the tensors of the model again, and drop the replaced ones."""
        self._former_sites = None
        if self._sites is not None:
            self._sites = TensorSites(self.index)

    @property
    def layouts(self) -> dict[str, Layout]:
        """Full name -> layout of every live tensor for which a step recorded one."""
        return self.tensors.changed()

    def former_tensor(self, name: str) -> torch.Tensor | None:
        """Return the tensor at a full name in the former index."""
        path, _, own_name = name.rpartition(".")
        for sites in (self._sites, self._former_sites):
            tensor = sites.at(path, own_name) if sites is not None else None
            if tensor is not None and self.index.tensor_at(name) is not tensor:
                return tensor
        return None

    def node(self, path: str) -> Node:
        """The node at ``path``, canonical or alias.

        Raises:
            PathError: no module there; close matches, or the step that removed it, are named.
        """
        index = self.index
        if path not in index.modules:
            path = self._canonical(path)
        node = self._nodes.get(path)
        if node is None:
            node = self._nodes[path] = Node(self, path)
        return node

    def select(self, pattern: str) -> NodeGroup:
        """The nodes that a glob matches, in the model's order.

        Raises:
            PathError: it matches none.
        """
        index = self.index
        paths = matching(pattern, index.modules)
        through_aliases = {index.all_aliases[alias] for alias in matching(pattern, index.all_aliases)}
        if not through_aliases.issubset(paths):
            selected = through_aliases.union(paths)
            paths = [path for path in index.modules if path in selected]
        if not paths:
            self._refuse_regular_expression(pattern)
            close = close_patterns(pattern, index.modules) or "print(sch) shows the tree"
            raise PathError(f"the pattern '{pattern}' matches no module", path=pattern, hint=close)
        return NodeGroup(tuple(self.node(path) for path in paths), pattern)

    def find(self, path: str) -> Node | NodeGroup:
        if is_glob(path) and path not in self.index.modules:
            return self.select(path)
        return self.node(path)

    def has(self, path: str) -> bool:
        """Whether a module is at ``path``, or a glob matches one.

        Raises:
            ArgumentError: the path is not a string.
        """
        if not isinstance(path, str):
            raise ArgumentError(f"a path must be a string (got {path!r})", hint='"encoder.layer.0" in sch')
        return self._walk_to(path) is not None or (
            is_glob(path) and bool(matching(path, (*self.index.modules, *self.index.all_aliases)))
        )

    def module_at(self, path: str) -> nn.Module:
        """The live module at a canonical path.

        Raises:
            StaleError: it is gone; the step that removed it is named.
            ApplyError: it is gone since an earlier edit of the primitive that is being applied.
        """
        module = self.index.modules.get(path)
        if module is not None:
            return module
        canonical = self.index.aliases.get(path)
        if canonical is not None:
            return self.index.modules[canonical]
        removal = self.open_edit.removal_of(path) if self.open_edit is not None else None
        if removal is not None:
            raise ApplyError(
                f"the module '{path}' is gone: an earlier edit of the same primitive replaced '{removal.path}'",
                path=path,
                hint=f"edit it before '{removal.path}' is replaced, or edit the new module",
            )
        record = self.owner.removal_of(path)
        reason = (
            f"step {record}, at {record.location}, removed it" if record else "it was removed outside of the schedule"
        )
        raise StaleError(
            f"the module '{path}' is gone: {reason}",
            path=path,
            hint=f"sch.undo(to={record.index - 1}) brings it back" if record else None,
        )

    def of_copy(self, copy: nn.Module, owner: ScheduleCore) -> Tree:
        """Make a tree of a copy's modules and tensors, with the layouts, hooks and forwards of this one.

        Args:
            copy: a deep copy of the root as it is now; what later steps change is not followed.
            owner: of the nodes.
        """
        tree = Tree(copy, self.mesh, owner)
        modules = tree.index.modules
        copies = {module: modules[path] for path, module in self.index.modules.items() if path in modules}
        tree.calls = self.calls.of_copies(copies)
        tree.tensors = self.tensors.of_copy(tree)
        tree.attributes = [(copies[module], name) for module, name in self.attributes if module in copies]
        return tree

    def reindex_if_moved(self, node: Node) -> None:
        """Forget the index if a module at or above ``node`` was replaced outside of the schedule."""
        if self._walk_to(node.path) is not self.index.modules.get(node.path):
            self.structure_changed()

    def _walk_to(self, path: str) -> nn.Module | None:
        module: nn.Module | None = self.root
        for name in path.split(".") if path else ():
            module = children_of(module).get(name) if module is not None else None
        return module

    def _canonical(self, path: str) -> str:
        module = self._walk_to(path)
        if module is not None:
            if self.index.path_of(module) is None:  # put in outside of the schedule
                self.structure_changed()
            canonical = self.index.path_of(module)
            assert canonical is not None
            return canonical
        record = self.owner.removal_of(path)
        if record is not None:
            raise PathError(
                f"module '{path}' was removed by step {record}, at {record.location}",
                path=path,
                hint=f"address the new module at '{record.path}', or sch.undo(to={record.index - 1})",
            )
        self._refuse_regular_expression(path)
        raise PathError(f"the model has no module '{path}'", path=path, hint=self._suggest(path))

    def _refuse_regular_expression(self, text: str) -> None:
        hint = meant_as_regular_expression(text, self.index.modules)
        if hint is not None:
            raise PathError(
                f"'{text}' matches no module: it is a regular expression, and paths take globs", path=text, hint=hint
            )

    def _suggest(self, path: str) -> str:
        found = close_paths(path, self.index.modules)
        if not found:
            return "print(sch) shows the tree"
        return "did you mean " + " or ".join(f"sch['{match}']" for match in found) + "?"
