"""Layouts of live tensors, by identity: which reference tensor each corresponds to.

A tensor that no step changed is its own reference, wherever the model holds it, so ties, aliases, moved modules and
undo need no bookkeeping. A tensor that a step made has the layout that the step recorded. What no tensor stands for any
more is either recorded as dropped, or as kept on other ranks; nothing is concluded from absence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from slapo_core.errors import WeightsError
from slapo_core.layout import Layout
from slapo_core.private import buffers_of, non_persistent_buffers_of, parameters_of
from slapo_core.tree.index import ModuleIndex, full_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core.tree.tree import Tree


class TensorTable:
    """Reference name and layout of every tensor, by tensor identity; written by journal entries only.

    Args:
        tree: whose tensors these are.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._reference: dict[int, tuple[torch.Tensor, str]] | None = None  # None: no step yet
        self._names: dict[str, str] = {}  # every name of the reference model -> the first name of its tensor
        self._layouts: dict[int, tuple[torch.Tensor, Layout]] = {}
        self._shapes: dict[int, tuple[torch.Tensor, tuple[int, ...]]] = {}
        self._modules: dict[int, tuple[nn.Module, str]] = {}  # those that the steps leave in the model, with a path
        self._made: dict[int, tuple[torch.Tensor, tuple[int, ...]]] = {}  # the shapes when a step last looked
        self.dropped: frozenset[str] = frozenset()
        """First names of reference tensors that a step dropped."""
        self.placement: Any = None
        """Which ranks hold which tensors, as a build keeps it; None: all hold what the tree has."""
        self.trained: Mapping[str, bool] = {}
        """Whether a parameter is trained, by first name, only where a step decided it."""
        self.trained_at_first: Mapping[str, bool] = {}
        """Whether a parameter of the reference model was trained before the first step, by first name."""

    # -- reading ----------------------------------------------------------------------------------------------

    def layout(self, tensor: torch.Tensor, name: str) -> Layout:
        """The layout of a live tensor.

        Args:
            tensor: a parameter or buffer of the model.
            name: a full name of it.
        """
        entry = self._layouts.get(id(tensor))
        if entry is not None:
            return entry[1]
        if self._reference is None:
            sites = self._tree.sites.of(tensor)
            return Layout(full_name(*sites[0]) if sites else name, self._shape(tensor))
        reference = self._reference.get(id(tensor))
        if reference is not None:
            return Layout(reference[1], self._shape(tensor))
        return self._adopted(tensor, name)

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is the reference model's own, or a step set its layout."""
        if id(tensor) in self._layouts:
            return True
        return bool(self._tree.sites.of(tensor)) if self._reference is None else id(tensor) in self._reference

    def changed(self) -> dict[str, Layout]:
        """Full name -> layout of every live tensor for which a step recorded one."""
        return {
            full_name(path, name): self._layouts[id(tensor)][1]
            for path, name, tensor in _live(self._tree)
            if id(tensor) in self._layouts
        }

    def of_copy(self, tree: Tree) -> TensorTable:
        """Make the table of a tree over a copy of the model: the same layouts, of the tensors of the copy."""
        table = TensorTable(tree)
        copied = {
            id(original): copy
            for path, module in self._tree.index.modules.items()
            if (other := tree.index.modules.get(path)) is not None
            for tables in ((parameters_of(module), parameters_of(other)), (buffers_of(module), buffers_of(other)))
            for name, original in tables[0].items()
            if original is not None and (copy := tables[1].get(name)) is not None
        }

        def translated(entries: dict[int, tuple[torch.Tensor, Any]]) -> dict[int, tuple[torch.Tensor, Any]]:
            return {id(copied[key]): (copied[key], value) for key, (_, value) in entries.items() if key in copied}

        if self._reference is not None:
            table._reference = translated(self._reference)
        table._layouts, table._shapes = translated(self._layouts), translated(self._shapes)
        table._made = translated(self._made)
        table._names, table.dropped = self._names, self.dropped
        table.trained, table.trained_at_first = self.trained, self.trained_at_first
        return table

    def replicated(self, mesh_dim: str) -> dict[str, torch.Tensor]:
        """Return the parameters and persistent buffers with replicas along ``mesh_dim``, by full name."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for path, name, tensor in _live(self._tree):
            if not self.is_known(tensor):
                continue  # of a wrapper: FullyShardedDataParallel's flat parameter
            layout = self.layout(tensor, full_name(path, name))
            apart = {one for one, _ in layout.shards()} | set(layout.partials())
            is_persistent = name not in non_persistent_buffers_of(self._tree.index.modules[path])
            if mesh_dim not in apart and is_persistent and not tensor.is_meta:
                found.setdefault(id(tensor), (full_name(path, name), tensor))
        return dict(found.values())

    # -- writing: for the journal -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Note the reference model, before the first step is applied."""
        if {p: id(m) for p, m in self._tree.index.modules.items()} != _identities(self._tree.root):
            self._tree.structure_changed()
        self._reference, self._names = {}, {}
        self._modules, self._made = (
            {id(module): (module, path) for path, module in self._tree.index.modules.items()},
            {},
        )
        for path, name, tensor in _live(self._tree):
            own = full_name(path, name)
            self._names[own] = self._reference.setdefault(id(tensor), (tensor, own))[1]
            self._made[id(tensor)] = (tensor, () if is_lazy(tensor) else tuple(tensor.shape))
        self.trained_at_first = {own: tensor.requires_grad for tensor, own in self._reference.values()}

    def forget(self) -> None:
        """Forget the reference model: no step is left."""
        self._reference = None
        self.trained_at_first = {}
        self._layouts.clear()
        self._modules.clear()
        self._made.clear()

    def assign(self, tensor: torch.Tensor, layout: Layout | None) -> Layout | None:
        """Record a layout, or None for none; return the former one."""
        before = self._layouts.pop(id(tensor), None)
        if layout is not None:
            self._layouts[id(tensor)] = (tensor, layout)
            self._made[id(tensor)] = (tensor, () if is_lazy(tensor) else tuple(tensor.shape))
        return before[1] if before is not None else None

    def exchange(self, path: str, old: nn.Module | None, new: nn.Module | None) -> None:
        """Record that a step replaced module ``old`` by ``new``; None: nothing."""
        for module in old.modules() if old is not None else ():
            if self._tree.index.path_of(module) is None:  # else it is elsewhere in the model, too
                self._modules.pop(id(module), None)
        for name, module in new.named_modules() if new is not None else ():
            self._modules[id(module)] = (module, full_name(path, name) if name else path)

    def check_unchanged(self) -> None:
        """Refuse modules replaced, added or resized outside of the schedule since its first step.

        Wrappers that hold the same tensors are fine. Without steps the model is looked at again.

        Raises:
            WeightsError: the module is named.
        """
        fresh = ModuleIndex(self._tree.root)
        if self._reference is None:
            if _identities(self._tree.root) != {path: id(module) for path, module in self._tree.index.modules.items()}:
                self._tree.structure_changed()
            return
        for path, module in fresh.modules.items():
            own = [one for one in (*parameters_of(module).values(), *buffers_of(module).values()) if one is not None]
            if id(module) not in self._modules and not all(map(self.is_known, own)):
                raise _changed(path, f"the {type(module).__name__} '{path}' was put into the model")
            for tensor in own if not self._shapes else ():
                before = self._made.get(id(tensor), (tensor, tuple(tensor.shape)))[1] if not is_lazy(tensor) else ()
                if before and tensor.numel() and before != tuple(tensor.shape):
                    raise _changed(path, f"'{path}' was resized from {before} to {tuple(tensor.shape)}")
        for module, path in self._modules.values():
            if fresh.path_of(module) is None and any(True for _ in _own(module)):
                raise _changed(path, f"the {type(module).__name__} '{path}' was taken out of the model")

    def drop(self, names: Collection[str]) -> frozenset[str]:
        """Record that reference tensors were dropped; return those dropped before."""
        before = self.dropped
        self.dropped = before | frozenset(name for name in names if name)
        return before

    def keep_shapes(self, kept: bool) -> None:
        """Freeze the known shapes while a runtime partitions tensors; or end that."""
        self._shapes = {id(tensor): (tensor, tuple(tensor.shape)) for _, _, tensor in _live(self._tree)} if kept else {}

    def seal(self) -> None:
        """Drop every tensor that is no longer in the model."""
        if self._reference is None:
            self.begin()
        assert self._reference is not None
        live = {id(tensor) for _, _, tensor in _live(self._tree)}
        self._reference = {key: value for key, value in self._reference.items() if key in live}
        self._layouts = {key: value for key, value in self._layouts.items() if key in live}
        self._shapes = {key: value for key, value in self._shapes.items() if key in live}
        self._made = {key: value for key, value in self._made.items() if key in live}
        self._tree.forget_former_tensors()

    def _adopted(self, tensor: torch.Tensor, name: str) -> Layout:
        """Return the layout of a tensor set outside of the schedule: that of the tensor it replaced."""
        former = self._tree.former_tensor(name)
        if former is not None and former is not tensor and self.is_known(former):
            layout = self.layout(former, name)
            if former.shape == tensor.shape:
                self._layouts[id(tensor)] = (tensor, layout)
                return layout
        return Layout(self._names.get(name, ""), self._shape(tensor))

    def _shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        kept = self._shapes.get(id(tensor))
        return kept[1] if kept is not None else () if is_lazy(tensor) else tuple(tensor.shape)


def _identities(root: nn.Module) -> dict[str, int]:
    return {path: id(module) for path, module in ModuleIndex(root).modules.items()}


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    """Return the parameters and buffers of a module, without its children's."""
    tables = (parameters_of(module), buffers_of(module))
    return (tensor for table in tables for tensor in table.values() if tensor is not None)


def _changed(path: str, what: str) -> WeightsError:
    return WeightsError(
        f"{what} outside of the schedule, after its first step: neither its state dicts nor its steps know of it",
        path=path,
        hint=f"change the model before create_schedule(model), or by a step: sch['{path}'].replace(...)",
    )


def _live(tree: Tree) -> Iterator[tuple[str, str, torch.Tensor]]:
    for path, module in tree.index.modules.items():
        for table in (parameters_of(module), buffers_of(module)):
            for name, tensor in table.items():
                if tensor is not None:
                    yield path, name, tensor
