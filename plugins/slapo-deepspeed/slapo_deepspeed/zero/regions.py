"""Modules that run as one region under ZeRO-3: traced, compiled, checkpointed.

DeepSpeed gathers what a module holds itself when the module is called. A graph reads the parameters of modules below
without calling those, and a compiler does not compile DeepSpeed's hooks. So such a module gathers everything below it,
and the modules below lose DeepSpeed's hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slapo_core.spec.node import Node
    from slapo_core.spec.request import BuildRequest

__all__ = ["gather_whole"]


def gather_whole(request: BuildRequest, engine: Any) -> None:
    """Let every module whose forward steps have changed gather all parameters below it; nothing without ZeRO-3.

    Args:
        request: of the build.
        engine: DeepSpeed's.
    """
    if not engine.zero_optimization_partition_weights():
        return
    import deepspeed

    below = set()
    for node in _outermost(request.schedule.root):
        own = {id(parameter) for parameter in node.module.parameters(recurse=False)}
        for parameter in node.module.parameters():
            if id(parameter) not in own:
                deepspeed.zero.register_external_parameter(node.module, parameter)
        for module in node.module.modules():
            if module is not node.module:
                below |= {id(module._forward_pre_hooks), id(module._forward_hooks)}
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
