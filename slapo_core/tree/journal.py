"""The journal: one entry per way of changing a model, each able to undo and redo itself exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from slapo_core.errors import ApplyError
from slapo_core.layout import Layout
from slapo_core.private import (
    HOOK_TABLES,
    buffers_of,
    children_of,
    full_backward_flag,
    hooks_of,
    parameters_of,
    set_full_backward_flag,
)
from slapo_core.tree.assignment import MISSING, Assignment, GradientHooks, ModuleHooks, TakenHook, hooks_of_user
from slapo_core.tree.forward import FORWARD, AppliedWrapper, CallTable, HookOrWrapper, ModuleForward, ReplacedForward
from slapo_core.tree.index import full_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core.observers import Forward, HookKind
    from slapo_core.tree.tree import Tree

__all__ = [
    "AddHook",
    "AddModule",
    "AnnotateParameter",
    "Assignment",
    "JournalEntry",
    "ReplaceModule",
    "SetAttribute",
    "SetForward",
    "SetLayout",
    "SetRequiresGrad",
    "SetState",
    "SetTensor",
    "TakenHook",
    "WrapForward",
]


Sites = tuple[tuple[str, str], ...]


class JournalEntry(ABC):
    """One change. ``redo`` after ``undo`` gives back the very same objects; both are safe after a partial redo."""

    @abstractmethod
    def redo(self) -> None: ...

    @abstractmethod
    def undo(self) -> None: ...

    @property
    def changed(self) -> tuple[nn.Module, ...]:
        """The modules that differ from those of the reference model."""
        return ()

    @abstractmethod
    def describe(self) -> str:
        """Describe the change, for ``explain``: ``"weight (3072, 768) -> (1536, 768), tp: S(0)"``."""


class AddHook(JournalEntry):
    """A hook, put back at the same place among the user's own when redone.

    Args:
        calls: where it is noted.
        module: which gets it.
        kind: of the hook.
        function: the hook.
        prepend: whether it runs before those that are there.
        active: whether torch is told of it.
    """

    def __init__(
        self,
        calls: CallTable,
        module: nn.Module,
        kind: HookKind,
        function: Callable[..., Any],
        prepend: bool,
        active: bool,
    ) -> None:
        self.calls, self.module, self.kind, self.function = calls, module, kind, function
        self.prepend, self.active = prepend, active
        self.change = HookOrWrapper(kind, function)
        self.register, self.tables = f"register_{kind}_hook", HOOK_TABLES[kind]
        self.id: int | None = None
        self.full_backward_before = full_backward_flag(module)
        self.taken: dict[str, TakenHook] | None = None  # by table, after an undo

    def redo(self) -> None:
        if self.active:
            self._register()
        self.calls.add(self.module, self.change, first=self.prepend)

    def undo(self) -> None:
        self.calls.remove(self.module, self.change)
        if self.id is None:
            return
        hooks = {table: getattr(self.module, table) for table in self.tables}
        self.taken = {table: TakenHook(own, self.id) for table, own in hooks.items() if self.id in own}
        if self.kind == "full_backward" and not hooks_of(self.module)["full_backward"]:
            set_full_backward_flag(self.module, self.full_backward_before)

    @property
    def changed(self) -> tuple[nn.Module, ...]:
        return (self.module,) if self.active else ()

    def describe(self) -> str:
        return f"{self.kind} hook {name_of(self.function)}{_if_inactive(self.active)}"

    def _register(self) -> None:
        if self.taken is not None:
            for table, taken in self.taken.items():
                taken.put_back(getattr(self.module, table))
            if self.kind == "full_backward":
                set_full_backward_flag(self.module, True)
            return
        options = {"with_kwargs": True} if self.kind in ("forward_pre", "forward") else {}
        handle = getattr(self.module, self.register)(self.function, prepend=self.prepend, **options)
        self.id = handle.id


class WrapForward(JournalEntry):
    """A wrapper around the present forward.

    Args:
        calls: where it is noted.
        module: whose forward it is.
        wrapper: makes the new forward of the present one.
        active: whether calls go through it.
        inside: within the wrappers that are there.
    """

    def __init__(
        self,
        calls: CallTable,
        module: nn.Module,
        wrapper: Callable[[Forward], Forward],
        active: bool,
        inside: bool = False,
    ) -> None:
        self.calls, self.module, self.wrapper, self.active, self.inside = calls, module, wrapper, active, inside
        self.change = HookOrWrapper("wrapper", wrapper)
        self.wrapping = AppliedWrapper(wrapper)
        self.forward: ModuleForward | None = None
        self.was_in_place = True

    def redo(self) -> None:
        if self.active:
            # A forward set while this step was undone is what the wrapper wraps now.
            if self.forward is None or (self.was_in_place and not self.forward.is_in_place):
                self.forward = ModuleForward.of(self.module)
            self.forward.add(self.wrapping, inside=self.inside)
        self.calls.add(self.module, self.change, first=self.inside)

    def undo(self) -> None:
        self.calls.remove(self.module, self.change)
        if self.forward is not None:
            self.was_in_place = self.forward.is_in_place
            self.forward.remove(self.wrapping)

    @property
    def changed(self) -> tuple[nn.Module, ...]:
        return (self.module,) if self.active else ()

    def describe(self) -> str:
        return f"forward wrapped by {name_of(self.wrapper)}{_if_inactive(self.active)}"


class SetForward(JournalEntry):
    """A function in place of the forward; wrappers stay around it.

    Args:
        calls: where it is noted.
        module: whose forward it is.
        new: called like the forward, with the module first.
    """

    def __init__(self, calls: CallTable, module: nn.Module, new: Forward) -> None:
        self.calls, self.module, self.new = calls, module, new
        self.base = MethodType(new, module)
        self.old: Any = None
        self.base_before: Any = None
        self.forward: ModuleForward | None = None
        self.was_in_place = True

    def redo(self) -> None:
        if self.forward is None or (self.was_in_place and not self.forward.is_in_place):
            self.forward = ModuleForward.of(self.module)
        self.base_before = self.forward.set_base(self.base)
        self.old = self.calls.set_state(self.module, FORWARD, self.new)

    def undo(self) -> None:
        if self.forward is None:
            return
        self.was_in_place = self.forward.is_in_place
        self.forward.set_base(self.base_before)
        self.calls.set_state(self.module, FORWARD, self.old)

    @property
    def changed(self) -> tuple[nn.Module, ...]:
        return (self.module,)

    def describe(self) -> str:
        return f"forward runs {repr(self.new) if isinstance(self.new, ReplacedForward) else name_of(self.new)}"


class SetState(JournalEntry):
    """A value that a plugin keeps for a module."""

    def __init__(self, calls: CallTable, module: nn.Module, key: str, value: Any) -> None:
        self.calls, self.module, self.key, self.new = calls, module, key, value
        self.old: Any = None

    def redo(self) -> None:
        self.old = self.calls.set_state(self.module, self.key, self.new)

    def undo(self) -> None:
        self.calls.set_state(self.module, self.key, self.old)

    def describe(self) -> str:
        return f"state '{self.key}': {self.new!r}"


def _if_inactive(active: bool) -> str:
    return "" if active else ", inactive (nothing to do on this mesh)"


class ReplaceModule(JournalEntry):
    """Another module under every path of the old one.

    A tensor that both modules hold keeps its layout. Any other one of the same name, or of the
    name that ``moved`` gives, takes over its layout; the rest of the new module's tensors is added. Hooks move along,
    unless the new module contains the old one.
    """

    def __init__(self, tree: Tree, path: str, new: nn.Module, moved: dict[str, str], dropped: frozenset[str]) -> None:
        self.tree, self.new = tree, new
        self.old = tree.module_at(path)
        self.path = path = tree.index.path_of(self.old) or path  # another one, if an earlier edit moved it
        self.holders = [
            (tree.module_at(parent), name)
            for parent, _, name in (place.rpartition(".") for place in tree.index.paths_of(path))
        ]
        table = tree.tensors
        before = {name: (tensor, table.layout(tensor, f"{path}.{name}")) for name, tensor in _named_tensors(self.old)}
        successor = {moved.get(name, name): layout for name, (_, layout) in before.items() if name not in dropped}
        # Hooks on a tensor move to its successor; a dropped tensor keeps its own.
        successors = dict(_named_tensors(new))
        kept = {id(tensor) for tensor in successors.values()}
        self.hooks = {
            name: GradientHooks(tensor, successors.get(moved.get(name, name)))
            for name, (tensor, _) in before.items()
            if name not in dropped and id(tensor) not in kept
        }
        self.contains_old = any(module is self.old for module in new.modules())
        self.module_hooks = None if self.contains_old else ModuleHooks(self.old, new)
        of_steps = [function for _, function in tree.calls.hooks(self.old)]
        registered = [function for table in hooks_of(self.old).values() for function in table.values()]
        self.hook_count = 0 if self.contains_old else len(of_steps) + len(hooks_of_user(registered, of_steps))
        self.assigned: list[tuple[torch.Tensor, Layout]] = []
        for name, tensor in _named_tensors(new):
            if not table.is_known(tensor):
                shape = () if is_lazy(tensor) else tuple(tensor.shape)
                self.assigned.append((tensor, successor.get(name) or Layout("", shape)))
        self.dropped = frozenset(before[name][1].origin for name in dropped if name in before)
        self.before: list[Layout | None] = []
        self.dropped_before: frozenset[str] = frozenset()

    def redo(self) -> None:
        self._set(self.new)
        self.tree.tensors.exchange(self.path, self.old, self.new)
        self.before = [self.tree.tensors.assign(tensor, layout) for tensor, layout in self.assigned]
        self.dropped_before = self.tree.tensors.drop(self.dropped)
        for hooks in self.hooks.values():
            hooks.carry()
        if self.module_hooks is not None:
            self.module_hooks.carry()
            self.tree.calls.exchange_hooks(self.old, self.new)

    def undo(self) -> None:
        if self.module_hooks is not None and self.module_hooks.take_back():
            self.tree.calls.exchange_hooks(self.old, self.new)
        self._set(self.old)
        self.tree.tensors.exchange(self.path, self.new, self.old)
        for hooks in self.hooks.values():
            hooks.take_back()
        for (tensor, _), layout in zip(self.assigned, self.before, strict=False):
            self.tree.tensors.assign(tensor, layout)
        self.tree.tensors.dropped = self.dropped_before

    def took_out(self, path: str) -> bool:
        """Return whether ``path`` was below the replaced module."""
        below = path.removeprefix(f"{self.path}.")
        if below == path:
            return False
        try:
            self.old.get_submodule(below)
        except AttributeError:
            return False
        return True

    def _set(self, module: nn.Module) -> None:
        for parent, name in self.holders:
            children_of(parent)[name] = module
        self.tree.structure_changed()

    @property
    def changed(self) -> tuple[nn.Module, ...]:
        return tuple(parent for parent, _ in self.holders)

    def describe(self) -> str:
        moved = f", with its {self.hook_count} hooks" if self.hook_count else ""
        return f"module {type(self.old).__name__} -> {type(self.new).__name__}{moved}"


class AddModule(JournalEntry):
    """A new child of a module. The model's tensors in it become tied; the others are added."""

    def __init__(self, tree: Tree, parent: nn.Module, name: str, new: nn.Module) -> None:
        self.tree, self.parent, self.name, self.new = tree, parent, name, new
        self.assigned = [
            (tensor, Layout("", () if is_lazy(tensor) else tuple(tensor.shape)))
            for _, tensor in _named_tensors(new)
            if not tree.tensors.is_known(tensor)
        ]
        self.before: list[Layout | None] = []

    def redo(self) -> None:
        children_of(self.parent)[self.name] = self.new
        path = full_name(self.tree.index.path_of(self.parent) or "", self.name)
        self.tree.structure_changed()
        self.tree.tensors.exchange(path, None, self.new)
        self.before = [self.tree.tensors.assign(tensor, layout) for tensor, layout in self.assigned]

    def undo(self) -> None:
        children_of(self.parent).pop(self.name, None)
        self.tree.structure_changed()
        self.tree.tensors.exchange("", self.new, None)
        for (tensor, _), layout in zip(self.assigned, self.before, strict=False):
            self.tree.tensors.assign(tensor, layout)

    @property
    def changed(self) -> tuple[nn.Module, ...]:
        return (self.parent,)

    def describe(self) -> str:
        return f"module {self.name} added: {type(self.new).__name__}"


class SetAttribute(JournalEntry):
    """A plain attribute."""

    def __init__(self, tree: Tree, module: nn.Module, name: str, value: Any) -> None:
        self.tree, self.module, self.name, self.new = tree, module, name, value
        self.old = module.__dict__.get(name, MISSING)
        self.assignment = Assignment(module, name)

    def redo(self) -> None:
        self.assignment.set(self.new)
        self.tree.attributes.append((self.module, self.name))

    def undo(self) -> None:
        self.assignment.undo()
        if (self.module, self.name) in self.tree.attributes:
            self.tree.attributes.remove((self.module, self.name))

    @property
    def changed(self) -> tuple[nn.Module, ...]:
        return (self.module,)

    def describe(self) -> str:
        old, new = ("(none)" if value is MISSING else repr(value) for value in (self.old, self.new))
        if "\n" in old + new:  # a configuration
            return f"{self.name} replaced by another {type(self.new).__name__}"
        return f"{self.name} {old} -> {new}"


def _named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return [*parameters, *buffers]


class SetTensor(JournalEntry):
    """Another parameter or buffer object in every place that holds the old one.

    Args:
        tree: the tree.
        sites: ``(module path, own name)`` of each place.
        old: what stands there; None for an empty slot.
        new: what comes there; None empties the slot.
        layout: of ``new``; None: a tensor of the model keeps its own, and another one takes over that of ``old``.
    """

    def __init__(
        self, tree: Tree, sites: Sites, old: torch.Tensor | None, new: torch.Tensor | None, layout: Layout | None
    ) -> None:
        self.tree, self.sites, self.old, self.new = tree, sites, old, new
        self.holders = [Assignment(tree.index.modules[path], name) for path, name in sites]
        # Attributes that the model's author or ``annotate`` set on the old object move to the new one, until ``undo``.
        self.carried = _attributes_to_carry(old, new)
        self.hooks = GradientHooks(old, new)
        former = tree.tensors.layout(old, full_name(*sites[0])) if old is not None else None
        self.layout, self.dropped = layout, tuple[str, ...]()
        if new is not None and layout is None and not tree.tensors.is_known(new):
            self.layout = former or Layout("", tuple(new.shape))
        elif former is not None and layout is None:
            own = tree.tensors.layout(new, "").origin if new is not None else None
            self.dropped = (former.origin,) if own != former.origin else ()
        self.before: Layout | None = None
        self.dropped_before: frozenset[str] = frozenset()
        self.put_over: dict[int, torch.Tensor | None] = {}  # by holder: tensors set over it meanwhile

    def redo(self) -> None:
        table = self.tree.tensors
        if self.new is not None:
            self.new.__dict__.update(self.carried)
        self.hooks.carry()
        for position, holder in enumerate(self.holders):
            # By attribute and not into the dictionary: nn.LSTM keeps further references.
            holder.set(self.put_over.get(position, self.new))
        self.tree.sites.move(self.old, self.new, self.sites)
        if self.new is not None and self.layout is not None:
            self.before = table.assign(self.new, self.layout)
        self.dropped_before = table.drop(self.dropped)

    def undo(self) -> None:
        for holder, site in zip(self.holders, self.sites, strict=True):
            if not any(holder.name in table for table in (parameters_of(holder.module), buffers_of(holder.module))):
                raise ApplyError(
                    f"'{full_name(*site)}' is no longer a parameter or buffer (a parametrization, perhaps)"
                )
        present = {place: holder.present() for place, holder in enumerate(self.holders)}
        self.put_over = {place: tensor for place, tensor in present.items() if tensor is not self.new}
        for holder in reversed(self.holders):
            holder.undo()
        for key in self.carried:
            self.new.__dict__.pop(key, None)
        self.hooks.take_back()
        self.tree.sites.move(self.new, self.old, self.sites)
        if self.new is not None and self.layout is not None:
            self.tree.tensors.assign(self.new, self.before)
        self.tree.tensors.dropped = self.dropped_before

    @property
    def changed(self) -> tuple[nn.Module, ...]:
        return tuple(holder.module for holder in self.holders)

    def describe(self) -> str:
        (_, name), *others = self.sites
        shapes = [tuple(tensor.shape) if tensor is not None else None for tensor in (self.old, self.new)]
        change = f"{shapes[0]} -> {shapes[1]}" if shapes[0] != shapes[1] else f"{shapes[0]}, other values"
        layout = self.layout
        tied = f", tied with {', '.join(full_name(*site) for site in others)}" if others else ""
        return f"{name} {change}" + (f", {layout}" if layout and layout.placements else "") + tied


class SetLayout(JournalEntry):
    """The layout of a tensor that itself stays: a split over a mesh dimension of one rank."""

    def __init__(self, tree: Tree, name: str, tensor: torch.Tensor, layout: Layout) -> None:
        self.tree, self.name, self.tensor, self.layout = tree, name, tensor, layout
        self.before: Layout | None = None

    def redo(self) -> None:
        self.before = self.tree.tensors.assign(self.tensor, self.layout)

    def undo(self) -> None:
        self.tree.tensors.assign(self.tensor, self.before)

    def describe(self) -> str:
        return f"{self.name} {tuple(self.tensor.shape)} stays, {self.layout}"


class AnnotateParameter(JournalEntry):
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


class SetRequiresGrad(JournalEntry):
    """Whether a parameter is trained."""

    def __init__(self, tree: Tree, parameter: nn.Parameter, sites: Sites, flag: bool) -> None:
        self.tree, self.parameter, self.new = tree, parameter, flag
        self.old, self.name = parameter.requires_grad, sites[0][1]
        own = full_name(*sites[0])
        self.key = tree.tensors.layout(parameter, own).origin or own
        self.before = tree.tensors.trained

    def redo(self) -> None:
        self.parameter.requires_grad_(self.new)
        self.before = self.tree.tensors.trained
        self.tree.tensors.trained = {**self.before, self.key: self.new}

    def undo(self) -> None:
        self.parameter.requires_grad_(self.old)
        self.tree.tensors.trained = self.before

    def describe(self) -> str:
        return f"{self.name} {'is trained' if self.new else 'is frozen'}"


def _attributes_to_carry(old: torch.Tensor | None, new: torch.Tensor | None) -> dict[str, Any]:
    if old is None or new is None or new is old:
        return {}
    return {key: value for key, value in old.__dict__.items() if key not in new.__dict__}


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's readable name: ``"checkpointed"``, also of a ``functools.partial``."""
    function = getattr(function, "func", function)  # functools.partial
    name: str = getattr(function, "__qualname__", None) or type(function).__qualname__
    return name.replace(".<locals>", "")
