"""`Edit`: what a primitive is given to change the model with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import ApplyError
from slapo_core.tree.journal import (
    AddHook,
    Annotate,
    Entry,
    ReplaceModule,
    SetAttribute,
    SetTensor,
    WrapForward,
)

if TYPE_CHECKING:
    from slapo_core.spec.edit import Forward, HookKind
    from slapo_core.spec.layout import Layout
    from slapo_core.spec.node import Node as NodeProtocol
    from slapo_core.spec.primitive import Primitive
    from slapo_core.tree.tree import Tree

__all__ = ["TreeEdit"]


class TreeEdit:
    """The implementation of :class:`slapo_core.spec.edit.Edit`.

    Args:
        tree: the tree that is changed.
        apply_inner: applies a primitive as part of this edit (given by the transaction).
        after_edit: called with the number of edits made so far after each one; the test kit raises from it.
    """

    def __init__(
        self,
        tree: Tree,
        *,
        apply_inner: Callable[[NodeProtocol, Primitive, TreeEdit], NodeProtocol] | None = None,
        after_edit: Callable[[int], None] | None = None,
    ) -> None:
        self._tree = tree
        self._apply_inner = apply_inner
        self._after_edit = after_edit
        self._open = True
        self.entries: list[Entry] = []
        self.notes: list[str] = []

    # -- the protocol; documented in spec/edit.py -------------------------------------------------------------

    def set_parameter(
        self, node: NodeProtocol, name: str, value: torch.Tensor | None, *, layout: Layout | None = None
    ) -> None:
        old = node.module._parameters[name]
        if value is not None and not isinstance(value, nn.Parameter):
            requires_grad = old.requires_grad if old is not None else value.is_floating_point()
            value = nn.Parameter(value, requires_grad=requires_grad)
        if value is not None and old is not None and value is not old:
            carry_attributes(old, value)
        self._do(SetTensor(self._tree, self._sites(node, name, old), old, value, layout))

    def set_buffer(
        self, node: NodeProtocol, name: str, value: torch.Tensor | None, *, layout: Layout | None = None
    ) -> None:
        old = node.module._buffers[name]
        self._do(SetTensor(self._tree, self._sites(node, name, old), old, value, layout))

    def replace_module(self, node: NodeProtocol, module: nn.Module, *, moved: Mapping[str, str] | None = None) -> None:
        if not node.path:
            raise ApplyError(
                "the root of the model cannot be replaced",
                hint="replace its children, or make a schedule of the new model",
            )
        self._do(ReplaceModule(self._tree, node.path, module, dict(moved or {})))

    def add_hook(
        self, node: NodeProtocol, kind: HookKind, function: Callable[..., Any], *, prepend: bool = False
    ) -> None:
        self._do(AddHook(node.module, kind, function, prepend))

    def wrap_forward(self, node: NodeProtocol, wrapper: Callable[[Forward], Forward]) -> None:
        self._do(WrapForward(node.module, wrapper))

    def set_attribute(self, node: NodeProtocol, name: str, value: Any) -> None:
        self._do(SetAttribute(node.module, name, value))

    def annotate(self, node: NodeProtocol, name: str, key: str, value: Any) -> None:
        self._do(Annotate(node.parameters[name], name, key, value))

    def apply(self, node: NodeProtocol, primitive: Primitive) -> NodeProtocol:
        if self._apply_inner is None:
            raise ApplyError(f"{primitive.name} cannot be applied from here: this edit belongs to no transaction")
        return self._apply_inner(node, primitive, self)

    def note(self, text: str) -> None:
        self.notes.append(text)

    # -- for the transaction ----------------------------------------------------------------------------------

    def rollback(self) -> None:
        """Undo everything, latest first."""
        self._open = False
        while self.entries:
            self.entries.pop().undo()

    def close(self) -> list[Entry]:
        """End the edit and give out what was done."""
        self._open = False
        return self.entries

    def effects(self) -> tuple[str, ...]:
        return (*(entry.describe() for entry in self.entries), *self.notes)

    def _do(self, entry: Entry) -> None:
        if not self._open:
            raise ApplyError(
                "this edit is over: its primitive has been applied or rolled back",
                hint="change the model only inside Primitive.apply",
            )
        self.entries.append(entry)  # first, so that a failure halfway through is undone too
        entry.redo()
        if self._after_edit is not None:
            self._after_edit(len(self.entries))

    def _sites(self, node: NodeProtocol, name: str, old: torch.Tensor | None) -> tuple[tuple[str, str], ...]:
        return self._tree.sites.of(old) if old is not None else ((node.path, name),)


def carry_attributes(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give ``new`` the Python attributes that were set on ``old`` (annotations, the model author's marks)."""
    for key, value in old.__dict__.items():
        new.__dict__.setdefault(key, value)
