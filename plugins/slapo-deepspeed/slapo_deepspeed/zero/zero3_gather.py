"""Gather full parameters under ZeRO-3 for traced regions and for linear layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.torch_version import TorchVersion

from slapo_deepspeed.private import forward_hooks_of

if TYPE_CHECKING:
    from slapo_core.tree.node import Node
    from slapo_runtime.context import BuildContext


def gather_whole(context: BuildContext, engine: Any) -> None:
    """Let every module whose forward steps have changed gather all parameters below it; nothing without ZeRO-3.

    Args:
        context: of the build.
        engine: DeepSpeed's.
    """
    if not engine.zero_optimization_partition_weights():
        return
    import deepspeed

    below = set()
    for node in _outermost(context.schedule.root):
        own = {id(parameter) for parameter in node.module.parameters(recurse=False)}
        for parameter in node.module.parameters():
            if id(parameter) not in own:
                deepspeed.zero.register_external_parameter(node.module, parameter)
        for module in node.module.modules():
            if module is not node.module:
                below |= set(map(id, forward_hooks_of(module)))
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    for handles in (offload.forward_hooks, offload.backward_hooks):
        for handle in handles:
            if id(handle.hooks_dict_ref()) in below:
                handle.remove()


def _outermost(node: Node) -> Iterator[Node]:
    """Nodes with a graph, or something around their forward, that are not below another one."""
    if node.graph is not None or node.wrappers:
        yield node
        return
    for child in node.children:
        yield from _outermost(child)


_IS_COMPILED_RIGHT = TorchVersion(torch.__version__) >= "2.13"
"""Older dynamo (2.11 at least) loses the weights' gradients in DeepSpeed's function; torch's own keeps them there, and
the gathered weights from forward to backward."""


@contextlib.contextmanager
def linear_of_torch() -> Iterator[None]:
    """Restore ``torch.nn.functional.linear`` after DeepSpeed's engine is made."""
    before = functional.linear
    try:
        yield
    finally:
        functional.linear = before


@contextlib.contextmanager
def partitioned_linear(config: Mapping[str, Any]) -> Iterator[None]:
    """Use DeepSpeed's linear function for partitioned weights only, in forward and backward.

    Args:
        config: DeepSpeed's, filled in; nothing is done without ZeRO-3, or with ``memory_efficient_linear`` false.
    """
    zero = config.get("zero_optimization", {})
    if zero.get("stage") != 3 or not zero.get("memory_efficient_linear", True):
        yield
        return
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    before = functional.linear

    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if hasattr(weight, "ds_id") and (_IS_COMPILED_RIGHT or not torch.compiler.is_compiling()):
            return zero3_linear_wrap(input, weight, bias)  # type: ignore[no-any-return]
        return before(input, weight, bias)

    functional.linear = linear
    try:
        yield
    finally:
        functional.linear = before
