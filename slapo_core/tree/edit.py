"""`Edit`: the only code that changes a model, journaled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import ApplyError, UndoError
from slapo_core.observers import goes_around
from slapo_core.private import buffers_of, children_of, parameters_of
from slapo_core.tree.assignment import gradient_hooks
from slapo_core.tree.forward import FORWARD, ChangeBelow, ReplacedForward
from slapo_core.tree.index import full_name
from slapo_core.tree.journal import (
    AddHook,
    AddModule,
    AnnotateParameter,
    JournalEntry,
    ReplaceModule,
    SetAttribute,
    SetForward,
    SetLayout,
    SetRequiresGrad,
    SetState,
    SetTensor,
    WrapForward,
)

if TYPE_CHECKING:
    from slapo_core.layout import Layout
    from slapo_core.observers import Forward, HookKind
    from slapo_core.tree.node import Node
    from slapo_core.tree.tree import Tree


_OF_CALLS = (AddHook, WrapForward, SetForward, ReplaceModule)
"""Edits that are noticed where a module is called, and nowhere else."""


class Edit:
    """Changes made by one application of a primitive; undone together, in reverse order.

    A node is a place: after ``replace_module`` it is the new module. What lay below the old one and has no place in the
    new one is gone; editing it raises ApplyError.

    Args:
        tree: the tree that is changed.
        after_edit: called with the number of edits made so far after each one; the test kit raises from it.
    """

    def __init__(
        self,
        tree: Tree,
        *,
        after_edit: Callable[[int], None] | None = None,
    ) -> None:
        self._tree = tree
        self._after_edit = after_edit
        self._open = True
        self.entries: list[JournalEntry] = []
        self._paths: list[str] = []  # of the nodes that the entries change
        self.notes: list[str] = []

    def set_parameter(self, node: Node, name: str, value: torch.Tensor | None, *, layout: Layout | None = None) -> None:
        """Replace an own parameter, everywhere it is tied.

        Args:
            node: the module that holds it.
            name: the parameter's own name, e.g. ``"weight"``.
            value: the new tensor, of any shape; a plain tensor becomes a parameter that requires a gradient if the old
                one did. Attributes set on the old parameter are carried over, and where the shape is the same, the
                hooks that the user registered on it; where it is not, the edit is refused. None empties the slot.
            layout: of the new tensor in the reference tensor; None keeps the present layout, or, where ``value`` is
                a tensor of the model already (a tie), its own: then the old one is given up.
        """
        old = _slot(node, "parameter", name)
        if value is not None and not isinstance(value, nn.Parameter):
            requires_grad = old.requires_grad if old is not None else value.is_floating_point()
            value = nn.Parameter(value, requires_grad=requires_grad)
        self._keep_hooks(node, name, old, value)
        self._do(node, SetTensor(self._tree, self._sites(node, name, old), old, value, layout))

    def set_buffer(self, node: Node, name: str, value: torch.Tensor | None, *, layout: Layout | None = None) -> None:
        """Replace an own buffer; it stays persistent or not."""
        old = _slot(node, "buffer", name)
        if isinstance(value, nn.Parameter):
            raise ApplyError(
                f"buffer '{name}' of '{node.path}' cannot be set to an nn.Parameter",
                path=node.path,
                hint="pass value.detach()",
            )
        self._keep_hooks(node, name, old, value)
        self._do(node, SetTensor(self._tree, self._sites(node, name, old), old, value, layout))

    def set_requires_grad(self, node: Node, name: str, flag: bool) -> None:
        """Freeze or train an own parameter, everywhere it is tied, also in ``verify``'s reference model."""
        parameter = _slot(node, "parameter", name)
        if not isinstance(parameter, nn.Parameter):
            raise ApplyError(f"parameter '{name}' of '{node.path}' is None and cannot be trained", path=node.path)
        self._do(node, SetRequiresGrad(self._tree, parameter, self._sites(node, name, parameter), flag))

    def set_layout(self, node: Node, name: str, layout: Layout) -> None:
        """Record the layout of an own parameter or buffer, without changing the tensor.

        A split over a mesh dimension of one rank is such a case: what later steps may do must not depend on the size.
        """
        self._do(node, SetLayout(self._tree, name, _tensor(node, name), layout))

    def replace_module(
        self,
        node: Node,
        module: nn.Module,
        *,
        moved: Mapping[str, str] | None = None,
        dropped: Collection[str] = (),
        is_same: bool = False,
    ) -> None:
        """Replace the node's module, under every path where it is reachable.

        The old module's hooks move to the new one, as the very tables that torch keeps, and wrappers of its forward
        are wrapped around the new one's; a new module that contains the old one leaves both where they are.

        Args:
            node: any node but the root.
            module: the new module. Hooks that the user registered on tensors of the old one are treated as by
                :meth:`set_parameter`.
            moved: where parameters and buffers of the old module live in the new one, both as names relative to the
                node; names that are the same on both sides need no entry.
            dropped: parameters and buffers of the old module without a successor in the new one, even where a
                name is the same. Each tensor without a successor must be named here, or a plugin must translate it
                (``slapo_to_reference``): ``build`` and ``verify`` refuse a tensor that got lost.
            is_same: whether the new module computes the same from the same parameters, so that every wrapper fits;
                otherwise only those that go around any forward (``slapo_goes_around``) are kept.
        """
        if not node.path:
            raise ApplyError(
                "the root of the model cannot be replaced",
                hint="replace its children, or make a schedule of the new model",
            )
        entry = ReplaceModule(self._tree, node.path, module, dict(moved or {}), frozenset(dropped))
        for name, hooks in entry.hooks.items():
            self._keep_hooks(node, name, hooks.old, hooks.new)
        self._do(node, entry)
        if entry.contains_old:
            return
        active: tuple[Any, ...] = getattr(entry.old.__dict__.get("forward"), "wrappers", ())
        for wrapper in self._tree.calls.wrappers(entry.old):
            if is_same or goes_around(wrapper):
                self.wrap_forward(node, wrapper, active=any(wrapper is one for one in active))

    def add_module(self, node: Node, name: str, module: nn.Module) -> Node:
        """Add a child to a module, for a replaced forward to call.

        Args:
            node: the module.
            name: of the child, e.g. ``"qkv"``; new there.
            module: the child. Tensors of the model that it holds are tied; others need a layout, or
                the plugin (``slapo_to_reference``).

        Returns:
            the child's node.
        """
        if not name.isidentifier() or hasattr(node.module, name):
            raise ApplyError(
                f"'{node.path}' cannot get a module '{name}': "
                + ("it has an attribute of that name" if name.isidentifier() else "that is not a name"),
                path=node.path,
                hint="take another name",
            )
        self._do(node, AddModule(self._tree, node.module, name, module))
        return self._tree.node(full_name(node.path, name))

    def add_hook(
        self,
        node: Node,
        kind: HookKind,
        function: Callable[..., Any],
        *,
        prepend: bool = False,
        active: bool = True,
    ) -> None:
        """Register a hook on the module.

        Args:
            node: the module.
            kind: when it is called.
            function: forward hooks are called with keyword arguments, ``function(module, args, kwargs)`` and
                ``function(module, args, kwargs, output)``; backward hooks as torch calls them.
            prepend: before the hooks that are there, and not behind them.
            active: False where it has nothing to do, e.g. a collective on a mesh of one rank: it is recorded, and
                ``node.hooks`` gives it, but it is not registered, and costs nothing. So the mesh size does not decide
                about later steps.
        """
        self._do(node, AddHook(self._tree.calls, node.module, kind, function, prepend, active))

    def wrap_forward(
        self,
        node: Node,
        wrapper: Callable[[Forward], Forward],
        *,
        active: bool = True,
        inside: bool = False,
    ) -> None:
        """Replace the module's forward ``f`` by ``wrapper(f)``; both take the module first.

        Args:
            node: the module.
            wrapper: called again when ``f`` changes, or for a copy of the model. The result must not keep a reference
                to a particular module, so that a deep copy of the model runs on itself.
            active: False where it has nothing to do, as for a hook: it is recorded, and ``node.wrappers`` gives it, but
                it is not called and the forward stays.
            inside: within the wrappers that are there, and not around them.
        """
        self._do(node, WrapForward(self._tree.calls, node.module, wrapper, active, inside))

    def set_forward(self, node: Node, forward: Forward) -> None:
        """Replace the module's forward by a function; the steps' wrappers stay around it.

        Args:
            node: the module.
            forward: takes the module first, and holds no module, so that a deep copy of the model runs on itself. A
                :class:`~slapo_core.tree.forward.ReplacedForward` follows later changes below the module.
        """
        self._do(node, SetForward(self._tree.calls, node.module, forward))

    def set_state(self, node: Node, key: str, value: Any) -> None:
        """Keep a value for the module, which ``node.state[key]`` gives until the step is undone.

        Args:
            node: the module.
            key: e.g. ``"acme.plan"``.
            value: not a module of the model, nor anything that holds one; None removes the value.
        """
        if key == FORWARD:
            raise ApplyError(f"'{FORWARD}' is the key of set_forward", path=node.path, hint="take another key")
        self._do(node, SetState(self._tree.calls, node.module, key, value))

    def set_attribute(self, node: Node, name: str, value: Any) -> None:
        """Set a plain attribute of the module, such as ``num_heads``."""
        module = node.module
        if isinstance(value, (nn.Module, nn.Parameter)) or any(
            name in registered for registered in (parameters_of(module), buffers_of(module), children_of(module))
        ):
            raise ApplyError(
                f"set_attribute takes plain values: '{name}' of '{node.path}' is a parameter, buffer or child, "
                f"or would be one (got {type(value).__name__})",
                path=node.path,
                hint="use edit.set_parameter, edit.set_buffer or edit.replace_module",
            )
        self._do(node, SetAttribute(self._tree, module, name, value))

    def annotate(self, node: Node, name: str, key: str, value: Any) -> None:
        """Set attribute ``key`` on the own parameter ``name``; it follows the parameter through later edits."""
        parameter = _slot(node, "parameter", name)
        if parameter is None:
            raise ApplyError(f"parameter '{name}' of '{node.path}' is None and carries no attributes", path=node.path)
        if hasattr(torch.Tensor, key):
            raise ApplyError(
                f"'{key}' is an attribute of every tensor: it cannot annotate '{name}' of '{node.path}'",
                path=node.path,
                hint="use another key, or edit.set_requires_grad" if key == "requires_grad" else "use another key",
            )
        self._do(node, AnnotateParameter(parameter, name, key, value))

    def note(self, text: str) -> None:
        """Note why nothing was changed, e.g. ``"mesh_dim 'tp' has one rank"``; shown by ``explain``."""
        self.notes.append(text)

    # -- for the transaction ----------------------------------------------------------------------------------

    def rollback(self) -> None:
        """Undo everything, latest first, and end the edit.

        Raises:
            UndoError: edits that cannot be undone; the others were.
        """
        self._open = False
        count, left = len(self.entries), []
        while self.entries:
            path, entry = self._paths.pop(), self.entries.pop()
            try:
                entry.undo()
            except Exception as error:  # noqa: BLE001 - whatever code of the model raises
                left.append(f"'{path}': {entry.describe()} ({type(error).__name__}: {error})")
        if left:
            raise UndoError(
                f"{len(left)} of its {count} edits could not be undone, and the model is not as before: "
                + "; ".join(left),
                hint="make a fresh model: sch.undo() takes back earlier steps, and not these edits",
            )

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Undo the edits made so far during a ``with`` block without edits."""
        done, was_open = list(zip(self._paths, self.entries, strict=True)), self._open
        self.entries, self._paths, self._open = [], [], False
        count = len(done)
        try:
            while count:
                done[count - 1][1].undo()
                count -= 1
            yield
        finally:
            left = []
            for position, (path, entry) in enumerate(done):
                if position >= count:
                    try:
                        entry.redo()
                    except Exception as error:  # noqa: BLE001 - whatever code of the model raises
                        left.append(f"'{path}': {entry.describe()} ({type(error).__name__}: {error})")
                        continue
                self.entries.append(entry)
                self._paths.append(path)
            self._open = was_open
            if left:
                raise UndoError(f"{len(left)} of {len(done)} edits could not be redone: " + "; ".join(left))

    def close(self) -> list[JournalEntry]:
        """End the edit and return its entries."""
        self._open = False
        return self.entries

    def removal_of(self, path: str) -> ReplaceModule | None:
        """Return the edit that removed the module at ``path``; None if none did."""
        replacements = [entry for entry in self.entries if isinstance(entry, ReplaceModule)]
        return next((entry for entry in reversed(replacements) if entry.took_out(path)), None)

    def described(self, path: str) -> tuple[str, ...]:
        """Describe the entries, for ``explain``, with paths relative to ``path``."""
        below = f"{path}." if path else ""
        done = zip(self._paths, self.entries, strict=True)
        described = [
            entry.describe() if at == path else f"'{at.removeprefix(below)}': {entry.describe()}" for at, entry in done
        ]
        return (*described, *self.notes)

    def _do(self, node: Node, entry: JournalEntry) -> None:
        if not self._open:
            raise ApplyError(
                "this edit is over: its primitive has been applied or rolled back",
                hint="change the model only inside Primitive.apply",
            )
        self.entries.append(entry)  # first, so that a failure halfway through is undone too
        self._paths.append(node.path)
        entry.redo()
        if self._after_edit is not None:
            self._after_edit(len(self.entries))

    def follow(self, first: int) -> None:
        """Report the changes since edit ``first`` to the replaced forwards above them.

        Raises:
            ApplyError: one of them cannot take up the change.
        """
        if not self._tree.calls.have_state:
            return
        done = list(zip(self._paths[first:], self.entries[first:], strict=True))
        wrapped = {
            path
            for path, entry in done
            if isinstance(entry, WrapForward) and entry.active and goes_around(entry.wrapper)
        }
        forwards = {path: entry.new for path, entry in done if isinstance(entry, SetForward)}
        is_waiting = any(isinstance(entry, SetTensor) for _, entry in done)
        for path, is_call in dict.fromkeys((path, isinstance(entry, _OF_CALLS)) for path, entry in done):
            names = path.split(".") if path else []
            for depth in range(len(names) - 1, -1, -1):
                above, modules = ".".join(names[:depth]), self._tree.index.modules
                forward = self._tree.calls.state(modules[above]).get(FORWARD) if above in modules else None
                if isinstance(forward, ReplacedForward):
                    node = self._tree.node(path) if path in modules else None
                    change = ChangeBelow(path, node, is_call, path in wrapped, forwards.get(path), is_waiting)
                    forward.take_up(change, self._tree.node(above), self)

    def _keep_hooks(self, node: Node, name: str, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
        """Refuse to drop the hooks of a tensor: only a new tensor of its shape takes them over."""
        lost = gradient_hooks(old, but=new)
        if old is None or old is new or not lost:
            return
        if new is not None and old.shape == new.shape and not self._tree.tensors.is_known(new):
            return
        if new is None:
            what = "leaves no tensor in its place"
        elif old.shape != new.shape:
            what = f"puts one of shape {tuple(new.shape)} in its place"
        else:
            what = "puts another tensor of the model in its place"
        full = full_name(node.path, name)
        raise ApplyError(
            f"'{full}' of shape {tuple(old.shape)} has hooks ({', '.join(lost)}), and this step {what}: they would be "
            "lost",
            path=node.path,
            hint="remove them before the step, and register them again after it",
        )

    def _sites(self, node: Node, name: str, old: torch.Tensor | None) -> tuple[tuple[str, str], ...]:
        if old is None:
            return ((node.path, name),)
        sites = self._tree.sites.of(old)
        if (node.path, name) not in sites:  # the tensor was put there outside of the schedule: look again
            self._tree.structure_changed()
            sites = self._tree.sites.of(old)
        return sites


def _slot(node: Node, kind: str, name: str) -> torch.Tensor | None:
    slots: Mapping[str, torch.Tensor | None] = (
        parameters_of(node.module) if kind == "parameter" else buffers_of(node.module)
    )
    if name not in slots:
        raise ApplyError(
            f"'{node.path}' has no {kind} '{name}'", path=node.path, hint=f"it has {', '.join(slots) or 'none'}"
        )
    return slots[name]


def _tensor(node: Node, name: str) -> torch.Tensor:
    tensor = _slot(node, "parameter" if name in parameters_of(node.module) else "buffer", name)
    if tensor is None:
        raise ApplyError(f"'{name}' of '{node.path}' is None", path=node.path)
    return tensor
