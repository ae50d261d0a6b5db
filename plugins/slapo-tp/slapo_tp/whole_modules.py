"""A collective asked of a module in which nothing is split: where it belongs instead.

Under sequence parallelism that is easily one module too far: the norm behind the last layer, or the head, works on
what the last layer gives, and it is there that the pieces have to be gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slapo_core import Node, Record, Violation
from slapo_tp.layers import layer_type_of, partial_axis
from slapo_tp.splits import block_around, output_state

if TYPE_CHECKING:
    from slapo_tp.sync import Sync

__all__ = ["nothing_split"]


def nothing_split(sync: Sync, node: Node, mode: str, op: object, axis: int) -> Violation:
    """Why this collective means nothing here, and what to write instead.

    Args:
        sync: the step.
        node: where; nothing is split on it or below it.
        mode: the step's mode, with the short forms written out.
        op: its op, likewise; None where the short form does not say which.
        axis: its axis.
    """
    message = f"nothing was split over mesh_dim '{sync.mesh_dim}' on this module or below it"
    if op == "all_gather":
        return Violation(message, _gather_hint(sync, node, axis))
    if op in ("all_reduce", "reduce_scatter") and mode == "fwd_post" and layer_type_of(node.module) is not None:
        return Violation(f"{message}: its output is whole on every rank, not a partial sum", _partial_hint(node))
    if op in ("all_reduce", "reduce_scatter") and mode != "bwd_post":
        return Violation(message, _sum_hint(sync, node, str(op)))
    return Violation(message, _split_hint(node))


def _gather_hint(sync: Sync, node: Node, axis: int) -> str:
    scattered = next((each for each in _before(node) if _sync_of(each, sync.mesh_dim, "reduce_scatter")), None)
    if scattered is None:
        return _split_hint(node)
    block = _block_of(scattered, node)
    if block is None:
        return f'if it is whole again there, use sch[\'{scattered.path}\'].sync("fwd_post", "all_reduce") in its place'
    gathered = _sync_of(block, sync.mesh_dim, "all_gather")
    if gathered is not None:
        return f"the pieces are gathered already, by {gathered}: leave this out"
    return f'gather where the pieces leave: sch[\'{block.path}\'].sync("fwd_post", "all_gather", axis={axis})'


def _partial_hint(node: Node) -> str:
    kind = layer_type_of(node.module)
    assert kind is not None
    if partial_axis(kind) is None:
        return "remove this call"
    return f'write shard("weight", axis={partial_axis(kind)}) before, which makes it one'


def _sum_hint(sync: Sync, node: Node, op: str) -> str:
    if _is_container(node):
        return _split_hint(node)
    axis = f", axis={sync.axis}" if op == "reduce_scatter" else ""
    for each in _before(node):
        if output_state(each, sync.mesh_dim) == "partial" and _sync_of(each, sync.mesh_dim) is None:
            there = f'reduce the partial sum where it is made: sch[\'{each.path}\'].sync("fwd_post", "{op}"{axis})'
            block = _block_of(node, each)
            if block is None:
                return there
            return f'{there}, or where it enters: sch[\'{block.path}\'].sync("fwd_pre", "{op}"{axis}, inputs=(0,))'
    return _split_hint(node)


def _split_hint(node: Node) -> str:
    if _is_container(node):
        return "shard the layers below it before"
    if layer_type_of(node.module) is None:
        return "put it at the layer that is split, or at a module around that layer"
    return 'write shard("weight", axis=...) before'


def _is_container(node: Node) -> bool:
    return bool(node.children) and not node.parameters


def _before(node: Node) -> Iterator[Node]:
    """The modules that are registered before this one and not around it, the nearest first."""
    root = node
    while root.parent is not None:
        root = root.parent
    earlier = []
    for each in root.walk():
        if each.path == node.path:
            break
        if not (f"{node.path}.".startswith(f"{each.path}.") or not each.path):
            earlier.append(each)
    yield from reversed(earlier)


def _block_of(node: Node, outside: Node) -> Node | None:
    """The repeated block that holds ``node`` and not ``outside``, e.g. the last layer; None if there is none."""
    block = block_around(node)
    return None if block is None or f"{outside.path}.".startswith(f"{block.path}.") else block


def _sync_of(node: Node, mesh_dim: str, op: str | None = None) -> Record | None:
    """The step that put a collective at the output of this very module."""
    for record in node.records:
        step: Any = record.primitive
        if record.name != "tp.sync" or step.mesh_dim != mesh_dim or step.mode not in ("fwd_post", "forward"):
            continue
        if op is None or step.op == op:
            return record
    return None
