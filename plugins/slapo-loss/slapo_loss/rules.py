"""Refuse modules and steps that do not fit ``linear_cross_entropy``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from slapo_core import Node, Primitive, Record, Violation

_TENSORS = (Tensor, nn.Parameter)


def head_violations(node: Node) -> Iterator[Violation]:
    """Yield the reasons why a module's logits do not follow from its weight."""
    module = node.module
    where = "name the layer that gives logits"
    if node.parent is None:
        yield Violation("the root is not a head", f"{where}: {_heads(node)}")
        return
    if not isinstance(module, nn.Linear):
        inside = [name for name, below in module.named_modules() if type(below) is nn.Linear]
        linear = f"sch['{node.path}.{inside[-1]}']" if inside else _heads(node)
        yield Violation(f"the head must be an nn.Linear (got {type(module).__name__})", f"{where}: {linear}")
        return
    if _record(node) is not None:
        yield Violation("the loss of this head is computed from its hidden states already", "remove this second call")
        return
    if type(module).forward is not nn.Linear.forward or not node.runs_own_forward:
        by = f" ({', '.join(map(str, node.records))})" if node.records else ""
        yield Violation(
            f"{type(module).__name__} has another forward than nn.Linear{by}: its logits do not follow from its weight "
            "alone",
            "leave out what sets that forward, or linear_cross_entropy",
        )
    weight: Any = module.weight
    if type(weight) not in _TENSORS or not weight.is_floating_point() or type(weight.data) is not Tensor:
        yield Violation(
            f"its weight is a {type(weight.data).__name__} of {weight.dtype}, which only its own kernels multiply",
            "quantize other layers than the head",
        )


def root_of(node: Node) -> Node:
    """Return the node of the model itself."""
    while node.parent is not None:
        node = node.parent
    return node


def _heads(node: Node) -> str:
    linears = [each for each in root_of(node).walk() if type(each.module) is nn.Linear]
    widest = max(linears, key=lambda each: each.module.out_features, default=None)  # type: ignore[arg-type,return-value]
    return f"sch['{widest.path}']" if widest is not None else "sch['lm_head']"


def split_violations(node: Node, mesh_dim: str) -> Iterator[Violation]:
    """Yield splits of a head on other axes than its classes, or not in order."""
    for name in ("weight", "bias"):
        if name not in node.parameters:
            continue
        layout = node.layout(name)
        others = [dim for dim, axis in layout.shards() if dim != mesh_dim or axis != 0]
        if not others and not layout.partials() and all(axis != 0 for axis, _ in layout.packing):
            if not _is_one_shard_a_rank(node, name, mesh_dim):
                yield Violation(f"'{name}' is not split into as many shards as mesh_dim '{mesh_dim}' has ranks", _CALL)
            continue
        yield Violation(f"'{name}' is {layout}, and the classes must be split over mesh_dim '{mesh_dim}'", _CALL)


_CALL = 'split it along its classes: shard("weight", axis=0), or ["weight", "bias"]'


def _is_one_shard_a_rank(node: Node, name: str, mesh_dim: str) -> bool:
    layout, mesh = node.layout(name), node.mesh
    if mesh is None or not layout.shards():
        return True
    padding = dict(layout.padding).get(0, 0)
    return node.parameters[name].shape[0] * mesh.size(mesh_dim) == layout.shape[0] + padding


def gather_violations(node: Node) -> Iterator[Violation]:
    """Yield each step that gathers the logits, unneeded by a loss from shards."""
    for record in node.records:
        primitive: Any = record.primitive
        if record.name == "tp.sync" and _communicates_output(primitive):
            yield Violation(
                f"the loss is computed from shards of the logits, and {record} communicates the full logits",
                f"leave out sch['{record.path}'].{primitive}: where logits are needed the step gathers them itself",
            )


def overlap_notes(node: Node) -> Iterator[str]:
    """Yield steps whose overlap has no effect any more."""
    for record in node.records:
        if record.name == "tp.sync" and getattr(record.primitive, "overlap", False):
            yield f"{record}: overlap=True has no effect on this loss: its forward makes all gradients"


def _communicates_output(sync: Any) -> bool:
    return sync.mode in ("fwd_post", "forward")


def beside_violations(node: Node, primitive: Primitive) -> Iterator[Violation]:
    """Yield the reasons why a step does not fit at such a head.

    Args:
        node: where the step is about to be applied.
        primitive: the step.
    """
    own = _record(node)
    if own is not None and primitive.name == "tp.sync" and _communicates_output(primitive):
        yield Violation(
            f"{own} computes the loss from shards of the logits, which this step would communicate",
            "leave this call out: where logits are needed linear_cross_entropy gathers them itself",
        )


def _record(node: Node) -> Record | None:
    return next((record for record in node.records if record.name == "loss.linear_cross_entropy"), None)
