"""Journal entries: one class per way of changing a model, each able to undo and redo itself exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.spec.layout import Layout
from slapo_core.tree.assignment import MISSING, Assignment
from slapo_core.tree.bound_forward import BoundForward
from slapo_core.tree.index import full_name

if TYPE_CHECKING:
    from slapo_core.spec.edit import Forward, HookKind
    from slapo_core.tree.tree import Tree

__all__ = [
    "AddHook",
    "Annotate",
    "Entry",
    "ReplaceModule",
    "SetAttribute",
    "SetRequiresGrad",
    "SetTensor",
    "WrapForward",
]


class Entry(ABC):
    """One change. ``redo`` after ``undo`` gives back the very same objects; both are safe after a partial redo."""

    @abstractmethod
    def redo(self) -> None: ...

    @abstractmethod
    def undo(self) -> None: ...

    @abstractmethod
    def describe(self) -> str:
        """What changed, for ``explain``: ``"weight (3072, 768) -> (1536, 768), tp: S(0)"``."""


class SetTensor(Entry):
    """Another parameter or buffer object in every place that holds the old one."""

    def __init__(
        self,
        tree: Tree,
        sites: tuple[tuple[str, str], ...],
        old: torch.Tensor | None,
        new: torch.Tensor | None,
        layout: Layout | None,
    ) -> None:
        self.tree, self.sites, self.old, self.new = tree, sites, old, new
        self.holders = [Assignment(tree.index.modules[path], name) for path, name in sites]
        # What the model's author or ``annotate`` set on the old object goes with it, and goes away again with ``undo``.
        self.carried = _attributes_to_carry(old, new)
        names = [full_name(path, name) for path, name in sites]
        self.old_layouts = {name: tree.layouts.get(name) for name in names}
        self.new_layouts = {name: layout or self.old_layouts[name] for name in names}

    def redo(self) -> None:
        if self.new is not None:
            self.new.__dict__.update(self.carried)
        for holder in self.holders:
            # By attribute and not into the dictionary: modules such as nn.LSTM keep further references.
            holder.set(self.new)
        self.tree.sites.move(self.old, self.new, self.sites)
        self.tree.set_layouts(self.new_layouts)

    def undo(self) -> None:
        for holder in reversed(self.holders):
            holder.undo()
        for key in self.carried:
            self.new.__dict__.pop(key, None)
        self.tree.sites.move(self.new, self.old, self.sites)
        self.tree.set_layouts(self.old_layouts)

    def describe(self) -> str:
        (_, name), *others = self.sites
        shapes = [tuple(tensor.shape) if tensor is not None else None for tensor in (self.old, self.new)]
        change = f"{shapes[0]} -> {shapes[1]}" if shapes[0] != shapes[1] else f"{shapes[0]}, other values"
        layout = self.new_layouts[full_name(*self.sites[0])]
        tied = f", tied with {', '.join(full_name(*site) for site in others)}" if others else ""
        return f"{name} {change}" + (f", {layout}" if layout and layout.placements else "") + tied


class ReplaceModule(Entry):
    """Another module under every path of the old one."""

    def __init__(self, tree: Tree, path: str, new: nn.Module, moved: dict[str, str], dropped: frozenset[str]) -> None:
        self.tree, self.path, self.new = tree, path, new
        self.old = tree.index.modules[path]
        self.holders = [
            (tree.module_at(parent), name)
            for parent, _, name in (place.rpartition(".") for place in tree.index.paths_of(path))
        ]
        prefix = f"{path}."
        below = {name: layout for name, layout in tree.layouts.items() if name.startswith(prefix)}
        arrived: dict[str, Layout | None] = {}
        for name, tensor in _named_tensors(self.old):
            if name in dropped:
                continue
            target = moved.get(name, name)
            layout = below.get(prefix + name)
            if layout is None and target != name:
                layout = Layout(prefix + name, tuple(tensor.shape))
            if layout is not None:
                arrived[prefix + target] = layout
        for name, tensor in _named_tensors(new):
            if name in dropped and prefix + name not in arrived:  # another tensor of the same name
                arrived[prefix + name] = Layout("", tuple(tensor.shape))
        self.old_layouts: dict[str, Layout | None] = dict.fromkeys(arrived) | below
        self.new_layouts: dict[str, Layout | None] = dict.fromkeys(below) | arrived
        # A module that stands in a second place has its canonical path there once the first is gone, or the reverse.
        self.elsewhere = [(name, tree.index.tensor_at(name), layout) for name, layout in tree.layouts.items()]
        self.arrived = arrived

    def redo(self) -> None:
        self._set(self.new)
        for name, tensor, layout in self.elsewhere:
            sites = [full_name(*site) for site in self.tree.sites.of(tensor)] if tensor is not None else []
            for other in {name, *sites} - self.arrived.keys():
                self.old_layouts.setdefault(other, self.tree.layouts.get(other))
                self.new_layouts[other] = layout if other in sites else None
        self.tree.set_layouts(self.new_layouts)

    def undo(self) -> None:
        self._set(self.old)
        self.tree.set_layouts(self.old_layouts)

    def _set(self, module: nn.Module) -> None:
        for parent, name in self.holders:
            parent._modules[name] = module
        self.tree.structure_changed()

    def describe(self) -> str:
        return f"module {type(self.old).__name__} -> {type(self.new).__name__}"


_HOOK_TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    # kind: registration method, dictionaries it writes to
    "forward_pre": ("register_forward_pre_hook", ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")),
    "forward": (
        "register_forward_hook",
        ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    ),
    "full_backward_pre": ("register_full_backward_pre_hook", ("_backward_pre_hooks",)),
    "full_backward": ("register_full_backward_hook", ("_backward_hooks",)),
}


class AddHook(Entry):
    """A hook, put back at the same place among the user's own when redone."""

    def __init__(self, module: nn.Module, kind: HookKind, function: Callable[..., Any], prepend: bool) -> None:
        self.module, self.kind, self.function, self.prepend = module, kind, function, prepend
        self.register, self.tables = _HOOK_TABLES[kind]
        self.id: int | None = None
        self.full_backward_before = module._is_full_backward_hook
        self.taken: dict[str, _TakenHook] | None = None  # by table, after an undo

    def redo(self) -> None:
        if self.taken is not None:
            for table, taken in self.taken.items():
                taken.put_back(getattr(self.module, table))
            if self.kind == "full_backward":
                self.module._is_full_backward_hook = True
            return
        options = {"with_kwargs": True} if self.kind in ("forward_pre", "forward") else {}
        handle = getattr(self.module, self.register)(self.function, prepend=self.prepend, **options)
        self.id = handle.id

    def undo(self) -> None:
        if self.id is None:
            return
        hooks = {table: getattr(self.module, table) for table in self.tables}
        self.taken = {table: _TakenHook(own, self.id) for table, own in hooks.items() if self.id in own}
        if self.kind == "full_backward" and not self.module._backward_hooks:
            self.module._is_full_backward_hook = self.full_backward_before

    def describe(self) -> str:
        return f"{self.kind} hook {_name_of(self.function)}"


class _TakenHook:
    """A hook taken out of one of torch's ordered dictionaries, and between which others it stood."""

    def __init__(self, hooks: dict[int, Any], identity: int) -> None:
        order = list(hooks)
        place = order.index(identity)
        self.before, self.after = order[:place], order[place + 1 :]
        self.identity, self.value = identity, hooks.pop(identity)

    def put_back(self, hooks: dict[int, Any]) -> None:
        """Behind the last of those that were before it; hooks that came or went since are left as they are."""
        order = list(hooks)
        ahead = [position for position, identity in enumerate(order) if identity in self.before]
        behind = [position for position, identity in enumerate(order) if identity in self.after]
        place = ahead[-1] + 1 if ahead else behind[0] if behind else len(order)
        items = list(hooks.items())
        items.insert(place, (self.identity, self.value))
        hooks.clear()
        hooks.update(items)


class WrapForward(Entry):
    """An instance-level forward around the present one."""

    def __init__(self, module: nn.Module, wrapper: Callable[[Forward], Forward]) -> None:
        self.module, self.wrapper = module, wrapper
        self.before = module.__dict__.get("forward", MISSING)
        self.bound: BoundForward | None = None

    def redo(self) -> None:
        if self.bound is None:
            self.bound = BoundForward(self.module, self.wrapper)
        self.module.__dict__["forward"] = self.bound

    def undo(self) -> None:
        if self.before is MISSING:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self.before

    def describe(self) -> str:
        return f"forward wrapped by {_name_of(self.wrapper)}"


class SetAttribute(Entry):
    """A plain attribute."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self.module, self.name, self.new = module, name, value
        self.old = module.__dict__.get(name, MISSING)
        self.assignment = Assignment(module, name)

    def redo(self) -> None:
        self.assignment.set(self.new)

    def undo(self) -> None:
        self.assignment.undo()

    def describe(self) -> str:
        old = "(none)" if self.old is MISSING else repr(self.old)
        return f"{self.name} {old} -> {self.new!r}"


class Annotate(Entry):
    """An attribute of a parameter object."""

    def __init__(self, tensor: torch.Tensor, name: str, key: str, value: Any) -> None:
        self.tensor, self.name, self.key, self.new = tensor, name, key, value
        self.old = tensor.__dict__.get(key, MISSING)

    def redo(self) -> None:
        setattr(self.tensor, self.key, self.new)

    def undo(self) -> None:
        if self.old is MISSING:
            self.tensor.__dict__.pop(self.key, None)
        else:
            self.tensor.__dict__[self.key] = self.old

    def describe(self) -> str:
        return f"{self.name}.{self.key} = {self.new!r}"


class SetRequiresGrad(Entry):
    """Whether a parameter is trained."""

    def __init__(self, tree: Tree, parameter: nn.Parameter, sites: tuple[tuple[str, str], ...], flag: bool) -> None:
        self.tree, self.parameter, self.new = tree, parameter, flag
        self.old = parameter.requires_grad
        self.name = sites[0][1]
        self.before = {full_name(*site): tree.trainable.get(full_name(*site)) for site in sites}

    def redo(self) -> None:
        self.parameter.requires_grad_(self.new)
        self.tree.set_trainable(dict.fromkeys(self.before, self.new))

    def undo(self) -> None:
        self.parameter.requires_grad_(self.old)
        self.tree.set_trainable(self.before)

    def describe(self) -> str:
        return f"{self.name} {'is trained' if self.new else 'is frozen'}"


def _attributes_to_carry(old: torch.Tensor | None, new: torch.Tensor | None) -> dict[str, Any]:
    if old is None or new is None or new is old:
        return {}
    return {key: value for key, value in old.__dict__.items() if key not in new.__dict__}


def _named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return [*parameters, *buffers]


def _name_of(function: Callable[..., Any]) -> str:
    function = getattr(function, "func", function)  # functools.partial
    name: str = getattr(function, "__qualname__", None) or type(function).__qualname__
    return name.replace(".<locals>", "")
