"""From an exported program to a graph that is called like the forward and reads the module's own tensors."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from slapo_core.graph.recording import Recording
from slapo_core.spec.tracer import GuardViolation

__all__ = ["convert"]


_DRAWING = (
    "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "native_dropout",
    "lstm", "gru", "rnn_tanh", "rnn_relu",
)  # fmt: skip


class _ExportGuards:
    """What torch.export assumed of the arguments, as one call in the graph."""

    def __init__(self, check: Any, index: int) -> None:
        self._check, self._index = check, index
        self.__name__ = self.__qualname__ = "export_guards"
        self.__module__ = __name__

    def __call__(self, *args: Any) -> None:
        try:
            self._check(*args)
        except AssertionError as error:
            raise GuardViolation(self._index, str(error)) from None


def convert(exported: ExportedProgram, recording: Recording, arguments: Mapping[str, Any]) -> None:
    """Write ``exported`` into the graph of ``recording``.

    Args:
        exported: of the recorded module.
        recording: an empty one.
        arguments: by parameter, as they were exported.
    """
    graph, holder = recording.graph, exported.module()
    inputs = {name: graph.placeholder(name) for name in arguments}
    leaves: list[tuple[fx.Node, Any]] = []
    for name, value in arguments.items():
        _take_apart(recording, inputs[name], value, leaves)
    for node, value in leaves:
        if not isinstance(value, torch.Tensor):
            recording.guard(node, value)
    known: dict[fx.Node, Any] = {}
    positions = iter(leaves)
    for node in holder.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(positions)[0]
        elif node.op == "get_attr":
            known[node] = _attribute(recording, holder, str(node.target))
        elif node.op == "call_module":
            _write_guards(recording, holder.get_submodule(str(node.target)), [known[one] for one in node.args])
        elif node.op == "output":
            flat = fx.map_arg(node.args[0], known.__getitem__)
            out = pytree.tree_unflatten(list(flat), exported.call_spec.out_spec)
            graph.output(recording.node(out))
        else:
            known[node] = graph.node_copy(node, known.__getitem__)
            known[node].target = _known_to_modes(node.target)
    graph.lint()


def _known_to_modes(target: Any) -> Any:
    """What draws random numbers, as the function that models call: who looks for that (verify does) must find it."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return target
    name = target._opname
    if name == "scaled_dot_product_attention":
        return torch.nn.functional.scaled_dot_product_attention
    return getattr(torch, name) if name.rstrip("_") in _DRAWING else target


def _take_apart(recording: Recording, node: fx.Node, value: Any, leaves: list[tuple[fx.Node, Any]]) -> None:
    """The leaves of an argument, in the order of torch's pytrees, each with a node that takes it out."""
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        taken = node
        for key in path:
            if isinstance(key, pytree.SequenceKey):
                taken = recording.compute(operator.getitem, (taken, key.idx))
            elif isinstance(key, pytree.MappingKey):
                taken = recording.compute(operator.getitem, (taken, key.key))
            elif isinstance(key, pytree.GetAttrKey):
                taken = recording.compute(getattr, (taken, key.name))
            else:
                raise recording.refusal(f"takes a {type(value).__name__} apart in a way of its own")
        leaves.append((taken, leaf))


def _attribute(recording: Recording, holder: fx.GraphModule, name: str) -> fx.Node:
    value = _get(holder, name)
    if not isinstance(value, torch.Tensor):
        raise recording.refusal(
            "switches gradients or autocast, or branches on values, which torch.export puts into graphs of their own"
        )
    return recording.read(name, value)


def _write_guards(recording: Recording, check: Any, nodes: list[fx.Node]) -> None:
    index = recording.note_guard("what torch.export assumed of the sizes", "kept")
    recording.compute(_ExportGuards(check, index), tuple(nodes))


def _get(holder: Any, name: str) -> Any:
    for part in name.split("."):
        holder = getattr(holder, part)
    return holder
