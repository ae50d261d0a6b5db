"""Refuse calls of ``shard`` that modules, tensors or earlier steps do not allow."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.nn.parameter import is_lazy

from slapo_core import Node, Violation
from slapo_core.internals import buffers_of, parameters_of
from slapo_tp.divisibility import channel_violations, padding_violations, size_violations
from slapo_tp.layers import LayerType, layer_type_of, reads_weights_itself
from slapo_tp.private import is_traceable_wrapper_subclass
from slapo_tp.split_state import as_tuple, own_tensor, sites, split_axis, split_together, weight_name
from slapo_tp.splits import Split


def names_violations(node: Node, names: tuple[str, ...]) -> Iterator[Violation]:
    """Refuse no names, repeated names, and an incomplete set of a norm's tensors."""
    if not names:
        yield Violation("it names no parameter", 'write shard("weight", axis=0)')
    for name, count in Counter(names).items():
        if count > 1:
            yield Violation(f"'{name}' is named {count} times", "name each parameter once")
    together, module = split_together(node), type(node.module).__name__
    left_out = [name for name in together if name not in names]
    if left_out and set(names) & set(together):
        listed = ", ".join(f"'{name}'" for name in left_out)
        stay = "stay" if len(left_out) > 1 else "stays"
        written = ", ".join(f'"{name}"' for name in together)
        yield Violation(
            f"{listed} {stay} full: {module} reads all of its tensors for each channel",
            f"use shard([{written}], axis=0)",
        )


def tensor_violation(node: Node, name: str) -> Violation | None:
    """Refuse a missing tensor, or one that no step can split."""
    tensor = own_tensor(node, name)
    if tensor is None:
        return _missing(node, name)
    if is_lazy(tensor):
        return Violation(f"'{name}' has no shape yet", "run the model once before, or give the layer its input size")
    if tensor.is_quantized or is_traceable_wrapper_subclass(tensor):
        subclass = "quantized tensor" if tensor.is_quantized else type(tensor.data).__name__
        return Violation(f"'{name}' is a {subclass}, not a plain tensor", "shard before it is converted")
    if tensor.dim() == 0:
        return Violation(f"'{name}' is a scalar and has no axis", f"leave '{name}' out")
    return None


def _missing(node: Node, name: str) -> Violation:
    module = node.module
    if name in parameters_of(module) or name in buffers_of(module):
        return Violation(f"'{name}' is None in this {type(module).__name__}", f"leave '{name}' out")
    tensors = {**node.parameters, **node.buffers}
    if not tensors:
        below = [child.path for child in node.children if child.parameters or child.buffers]
        hint = f"its children have some: sch['{below[0]}'].shard(...)" if below else "print(sch) shows the tree"
        return Violation(f"this {type(module).__name__} has no parameter or buffer of its own", hint)
    listed = ", ".join(f"'{own}' {tuple(tensor.shape)}" for own, tensor in tensors.items())
    close = difflib.get_close_matches(name, tensors, n=1)
    hint = f"did you mean '{close[0]}'? it has {listed}" if close else f"it has {listed}"
    return Violation(f"this {type(module).__name__} has no parameter or buffer '{name}'", hint)


def no_such_axis(node: Node, name: str, axis: int) -> Violation:
    """Refuse an axis that the tensor does not have; name its axes."""
    kind, weight, tensor = layer_type_of(node.module), own_tensor(node, weight_name(node)), own_tensor(node, name)
    assert tensor is not None
    if name == "bias" and kind is not None and weight is not None and -weight.dim() <= axis < weight.dim():
        output = kind.axis_of("output")
        return Violation(
            f"'bias' lies along the weight's output axis {output}, not along its axis {axis}",
            f'use shard(["weight", "bias"], axis={output}), or shard("weight", axis={axis}): '
            "sync then adds the full bias once",
        )
    choices = " or ".join(f"axis={position}" for position in range(tensor.dim()))
    axes = f"{tensor.dim()} axes" if tensor.dim() > 1 else "1 axis"
    return Violation(f"'{name}' has {axes} {tuple(tensor.shape)}", f"use {choices}")


def split_violations(node: Node, split: Split) -> Iterator[Violation]:
    """Refuse a split that earlier steps, modules or sizes do not allow."""
    refusals = list(_split_already(node, split)) or [
        refusal for place, own in sites(node, split.name) for refusal in _module_violations(node, place, own, split)
    ]
    if refusals:
        yield from refusals
    elif split.pad:
        yield from padding_violations(node, split)
    else:
        yield from size_violations(node, split)
        if split.shards is not None:
            yield from _sharing_violations(node, split)


def _split_already(node: Node, split: Split) -> Iterator[Violation]:
    name, mesh_dim = split.name, split.mesh_dim
    before = split_axis(node, name, mesh_dim)
    if before is not None:
        steps = [
            str(record)
            for place, own in sites(node, name)
            for record in place.records
            if record.name == "tp.shard" and own in as_tuple(record.primitive.arguments()["names"])
        ]
        by = f" by {steps[-1]}" if steps else ""
        yield Violation(
            f"'{name}' is split over mesh_dim '{mesh_dim}' already, on axis {before}{by}",
            "remove this call, or name another mesh_dim",
        )
    for other, other_axis in node.layout(name).shards():
        if other_axis == split.axis and other != mesh_dim:
            yield Violation(
                f"axis {split.axis} of '{name}' is split over mesh_dim '{other}' already", "split another axis of it"
            )


def _module_violations(node: Node, place: Node, name: str, split: Split) -> Iterator[Violation]:
    """Refuse a shard that the module at ``place`` cannot run with."""
    attention = place if isinstance(place.module, nn.MultiheadAttention) else place.parent
    if attention is not None and reads_weights_itself(attention.module, place.module):
        what = f", so '{place.path}' is never called" if attention is not place else ""
        yield Violation(
            f"nn.MultiheadAttention reads all of its weights in one function, which splits them by embed_dim{what}",
            f"write sch['{attention.path}'].replace(...) with an attention of separate projections, and shard those",
        )
        return
    kind, module = layer_type_of(place.module), type(place.module).__name__
    if kind is None:
        if isinstance(place.module, nn.Embedding) and name == "weight" and split.axis == 0:
            yield Violation(
                f"the forward of {module} does not call that of nn.Embedding by super(), and would look up the ids of "
                "all ranks in the rows of one",
                f"split its features, axis=1, or write sch['{place.path}'].replace(...) with an nn.Embedding",
            )
        elif place is not node:
            yield Violation(
                f"'{name}' of '{place.path}' is the same tensor, and {module} is not a known layer type",
                f"if it works with a shard, write sch['{place.path}'].shard('{name}', axis={split.axis}) instead of "
                "this",
            )
        return
    if name == kind.weight:
        for refusal in kind.refusals(place.module, split.axis):
            tied = f"at '{place.path}', tied to it: {refusal.message}"
            yield refusal if place is node else Violation(tied, refusal.hint)
        yield from _forward_violations(place, kind, split)
    elif name == "bias" and _splits_other_axis(place, kind, split.mesh_dim):
        yield Violation("the weight is split on its input axis, so sync adds the full bias once", "leave 'bias' out")


def _splits_other_axis(place: Node, kind: LayerType, mesh_dim: str) -> bool:
    """Return whether the weight is split on another axis than the bias's."""
    if own_tensor(place, kind.weight) is None:
        return False
    axis = split_axis(place, kind.weight, mesh_dim)
    return axis is not None and kind.role(axis) not in ("output", "channel")


def _forward_violations(place: Node, kind: LayerType, split: Split) -> Iterator[Violation]:
    """Refuse a split of the weight that the layer's forward cannot follow."""
    role, bias = kind.role(split.axis), own_tensor(place, "bias")
    if role == "channel" and hasattr(place.module, "groups"):
        yield from channel_violations(place, kind, split)
    if role == "vocabulary" and split.packed != 1:
        yield Violation(f"the vocabulary of {kind.name} is one matrix (got packed={split.packed})", "leave packed out")
    sums = kind.sums_over(split.axis) and bias is not None
    if sums and split_axis(place, "bias", split.mesh_dim) is not None:
        yield Violation(
            "the bias is split already, which belongs to the weight's output axis", f"use axis={kind.axis_of('output')}"
        )
    if (role == "vocabulary" or sums) and not place.runs_own_forward:
        steps = f" by {place.records[-1]}" if place.records else ""
        yield Violation(
            f"the forward of '{place.path}' was changed{steps}, and splitting this axis has to change it too",
            "shard first, then apply the other step",
        )


def _sharing_violations(node: Node, split: Split) -> Iterator[Violation]:
    """Refuse shards on several ranks where the axis is not output features."""
    for place, own in sites(node, split.name):
        kind = layer_type_of(place.module)
        if kind is None or own not in (kind.weight, *kind.together) or kind.role(split.axis) == "output":
            continue
        where = "" if place is node else f" of '{place.path}', tied to it,"
        yield Violation(
            f"axis {split.axis} of '{own}'{where} is the {kind.role(split.axis)} axis of {kind.name}: shards= is for "
            "output features only",
            "leave shards out",
        )
