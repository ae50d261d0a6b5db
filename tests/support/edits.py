"""Primitives that use each operation of `Edit`, and fault injectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from slapo_core import Edit, Equivalence, Layout, Node, Primitive, Violation


class TestPrimitive(Primitive):
    __test__ = False
    equivalence = Equivalence.EXACT


@dataclass(frozen=True)
class Halve(TestPrimitive):
    """Every own parameter and buffer with an even first axis loses half of it; layouts say which half stayed."""

    name = "test.halve"

    def preconditions(self, node: Node) -> Iterator[Violation]:
        if not self._names(node):
            yield Violation("there is nothing to halve")

    def apply(self, node: Node, edit: Edit) -> None:
        for name in self._names(node):
            tensor = {**node.parameters, **node.buffers}[name]
            layout = node.layout(name)
            halved = Layout(layout.origin, layout.shape, (*layout.placements, ("tp", Shard(0))))
            piece = tensor.detach()[: tensor.shape[0] // 2].clone()
            change = edit.set_parameter if name in node.parameters else edit.set_buffer
            change(node, name, piece, layout=halved)

    def _names(self, node: Node) -> list[str]:
        return [n for n, t in {**node.parameters, **node.buffers}.items() if t.dim() and t.shape[0] % 2 == 0]


@dataclass(frozen=True)
class HookAll(TestPrimitive):
    """A hook of each kind, in front of or behind the others."""

    name = "test.hook_all"
    prepend: bool = False

    def apply(self, node: Node, edit: Edit) -> None:
        edit.add_hook(node, "forward_pre", pre_hook, prepend=self.prepend)
        edit.add_hook(node, "forward", post_hook, prepend=self.prepend)
        edit.add_hook(node, "full_backward_pre", backward_pre_hook, prepend=self.prepend)
        edit.add_hook(node, "full_backward", backward_hook, prepend=self.prepend)


@dataclass(frozen=True)
class Everything(TestPrimitive):
    """One edit of every kind, and those of another primitive."""

    name = "test.everything"

    def apply(self, node: Node, edit: Edit) -> None:
        edit.wrap_forward(node, wrapped)
        edit.set_attribute(node, "brand_new", [1, 2])
        edit.set_attribute(node, "brand_new", 3)
        for name, parameter in node.parameters.items():
            edit.annotate(node, name, "marked", True)
            edit.set_parameter(node, name, torch.zeros(3))
            edit.set_parameter(node, name, parameter)
            edit.set_parameter(node, name, None)
        for name in node.buffers:
            edit.set_buffer(node, name, torch.zeros(2))
        HookAll(prepend=True).apply(node, edit)
        for child in node.children:
            edit.replace_module(child, nn.Identity())
        edit.wrap_forward(node, wrapped)


@dataclass(frozen=True)
class Call(TestPrimitive):
    """Whatever a test wants to happen inside of apply."""

    name = "test.call"
    function: Any
    after: Any = None

    def apply(self, node: Node, edit: Edit) -> Any:
        return self.function(node, edit)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if self.after is not None:
            yield from self.after(node)


def pre_hook(module: nn.Module, args: Any, kwargs: Any) -> None:
    return None


def post_hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    return None


def backward_pre_hook(module: nn.Module, grad_output: Any) -> None:
    return None


def backward_hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    return None


def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    return run


class Fault(Exception):  # noqa: N818 - it is injected, not reported
    pass


def fault_after(count: int, error: BaseException | None = None) -> Callable[[int], None]:
    """Raises after the ``count``-th edit."""

    def after_edit(done: int) -> None:
        if done == count:
            raise error if error is not None else Fault(f"after edit {done}")

    return after_edit
