"""Keep only this rank's shard of a parameter or buffer: ``shard``, and its checks."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from slapo_core import Edit, Equivalence, Layout, Node, Primitive, Violation
from slapo_tp.collectives import RankGroup
from slapo_tp.forwards import leave_bias_out, look_up_own_rows, look_up_own_rows_below
from slapo_tp.layers import EMBEDDING, LINEAR, LayerType, SubclassType, layer_type_of, reads_weights_itself
from slapo_tp.preconditions import Distributed, Divisible
from slapo_tp.private import buffers_of, is_traceable_wrapper_subclass, parameters_of
from slapo_tp.splits import (
    KV_HEAD_COUNTS,
    as_tuple,
    head_groups,
    head_sizes,
    heads_of,
    mesh_size,
    own_tensor,
    queries_and_keys,
    shards_violations,
    sites,
    sized_tensor,
    split_axis,
    split_together,
    tensor_axis,
    weight_name,
)
from slapo_tp.sync_gradient import gradients_summed

Packed = int | tuple[int, ...]
Shards = int | tuple[int | None, ...] | None


def names_violations(names: tuple[str, ...]) -> Iterator[Violation]:
    if not names:
        yield Violation("it names no parameter", 'write shard("weight", axis=0)')
    for name, count in Counter(names).items():
        if count > 1:
            yield Violation(f"'{name}' is named {count} times", "name each parameter once")


def together_violations(node: Node, names: tuple[str, ...]) -> Iterator[Violation]:
    """Refuse to split only some of the tensors that belong together: a norm without its running statistics."""
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


def packed_sizes(packed: Packed, extent: int, shards: Shards = None) -> tuple[int, ...]:
    """Return the sizes of the matrices along an axis: ``packed_sizes(3, 768) == (256, 256, 256)``.

    With ``shards`` for each matrix, ``packed`` may be one of as many groups as there are shards.
    """
    if not isinstance(packed, tuple):
        return (extent // packed,) * packed
    groups = most_shards(shards) if isinstance(shards, tuple) else None
    return packed * groups if groups and sum(packed) * groups == extent else packed


def most_shards(shards: Shards) -> int | None:
    """Return the number of different shards of the matrices that ranks share; None: a shard a rank."""
    return next((count for count in shards if count is not None), None) if isinstance(shards, tuple) else shards


def counts_violations(shards: Shards, packed: Packed) -> Iterator[Violation]:
    """Refuse numbers of shards that are not one for each packed matrix, or of which two differ."""
    if not isinstance(shards, tuple):
        return
    matrices = len(packed) if isinstance(packed, tuple) else packed
    if len(shards) != matrices or matrices < 2:
        yield Violation(
            f"shards={shards} is for {len(shards)} packed matrices (got packed={packed})",
            "one number of shards for each packed matrix, None for one shard a rank: packed=(64, 16, 16), "
            "shards=(None, 2, 2)",
        )
    elif len({count for count in shards if count is not None}) != 1:
        yield Violation(
            f"shards={shards} must have one number, that of the KV heads, and None for one shard a rank",
            "e.g. shards=(None, 2, 2) for queries, keys and values",
        )


def tensor_violations(
    node: Node,
    name: str,
    names: tuple[str, ...],
    axis: int,
    packed: Packed,
    mesh_dim: str,
    *,
    pad: bool,
    shards: Shards = None,
) -> Iterator[Violation]:
    """Every reason why ``shard(names, axis, ...)`` with these arguments cannot split tensor ``name`` of this node."""
    tensor = own_tensor(node, name)
    if tensor is None:
        yield _missing(node, name)
        return
    unsplittable = _unsplittable(name, tensor)
    if unsplittable is not None:
        yield unsplittable
        return
    own_axis = tensor_axis(node, name, names, axis)
    if own_axis is None:
        yield _no_such_axis(node, name, tensor, axis)
        return
    split = list(_split_already(node, name, own_axis, mesh_dim))
    if split:
        yield from split
        return
    refusals = [
        refusal
        for place, own in sites(node, name)
        for refusal in _module_refuses(node, place, own, own_axis, packed, mesh_dim)
    ]
    if refusals:
        yield from refusals
    elif not pad:
        yield from _indivisible(node, name, tensor, own_axis, packed, mesh_dim, shards)
        if shards is not None:
            yield from _cannot_be_shared(node, name, own_axis)
    elif shards is not None:
        yield Violation(f"pad=True is for one shard a rank (got shards={shards})", "leave one of them out")
    elif packed != 1 or not _can_be_padded(node, name, own_axis):
        got = f"axis {own_axis} of '{name}' of {type(node.module).__name__}" if packed == 1 else f"packed={packed}"
        yield Violation(
            f"pad=True is for the rows of nn.Embedding and the output axis of nn.Linear (got {got})", "leave pad out"
        )


def _can_be_padded(node: Node, name: str, axis: int) -> bool:
    """Whether every known layer with the tensor has it as its rows or outputs, and there is one."""
    kinds = [(layer_type_of(place.module), own) for place, own in sites(node, name)]
    known = [(kind, own) for kind, own in kinds if kind is not None]
    return (
        bool(known)
        and axis == 0
        and all(kind.name in (LINEAR.name, EMBEDDING.name) and own in ("weight", "bias") for kind, own in known)
    )


def _is_vocabulary(node: Node, rows: int) -> bool:
    """Whether an embedding of the model has as many rows."""
    root = node
    while root.parent is not None:
        root = root.parent
    embeddings = (each for each in root.walk() if isinstance(each.module, nn.Embedding))
    return any(each.layout("weight").shape[0] == rows for each in embeddings if "weight" in each.parameters)


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


def _unsplittable(name: str, tensor: Tensor) -> Violation | None:
    if is_lazy(tensor):
        return Violation(f"'{name}' has no shape yet", "run the model once before, or give the layer its input size")
    if tensor.is_quantized or is_traceable_wrapper_subclass(tensor):
        subclass = "quantized tensor" if tensor.is_quantized else type(tensor.data).__name__
        return Violation(f"'{name}' is a {subclass}, not a plain tensor", "shard before it is converted")
    if tensor.dim() == 0:
        return Violation(f"'{name}' is a scalar and has no axis", f"leave '{name}' out")
    return None


def _no_such_axis(node: Node, name: str, tensor: Tensor, axis: int) -> Violation:
    kind, weight = layer_type_of(node.module), own_tensor(node, weight_name(node))
    if name == "bias" and kind is not None and weight is not None and -weight.dim() <= axis < weight.dim():
        output = kind.axis_of("output")
        return Violation(
            f"'bias' lies along the weight's output axis {output}, not along its axis {axis}",
            f'use shard(["weight", "bias"], axis={output}), or shard("weight", axis={axis}): '
            "the whole bias is then added once, by sync",
        )
    choices = " or ".join(f"axis={position}" for position in range(tensor.dim()))
    axes = f"{tensor.dim()} axes" if tensor.dim() > 1 else "1 axis"
    return Violation(f"'{name}' has {axes} {tuple(tensor.shape)}", f"use {choices}")


def _split_already(node: Node, name: str, axis: int, mesh_dim: str) -> Iterator[Violation]:
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
        if other_axis == axis and other != mesh_dim:
            yield Violation(
                f"axis {axis} of '{name}' is split over mesh_dim '{other}' already", "split another axis of it"
            )


def _indivisible(
    node: Node, name: str, tensor: Tensor, axis: int, packed: Packed, mesh_dim: str, shards: Shards
) -> Iterator[Violation]:
    extent, size = tensor.shape[axis], mesh_size(node, mesh_dim)
    what = f"axis {axis} of '{name}'"
    if isinstance(packed, tuple):
        if sum(packed_sizes(packed, extent, shards)) != extent or min(packed, default=0) < 1:
            groups = f", for each of {most_shards(shards)} groups or in all" if isinstance(shards, tuple) else ""
            yield Violation(
                f"{what} has {extent} elements, but packed={packed} gives {sum(packed)}{groups}",
                "packed lists the size of each matrix on that axis, in elements",
            )
            return
    elif packed < 1 or extent % packed:
        yield Violation(
            f"{what} has {extent} elements, which packed={packed} does not divide",
            "give the size of each matrix, e.g. packed=(768, 256, 256)",
        )
        return
    sizes = packed_sizes(packed, extent, shards)
    counts = shards if isinstance(shards, tuple) else (shards,) * len(sizes)
    if len(counts) < len(sizes):
        yield from _groups_are_cut(node, what, sizes, counts, mesh_dim)
        return
    for number, (length, count) in enumerate(zip(sizes, counts, strict=True), start=1):
        part = what if len(sizes) == 1 else f"matrix {number} of {len(sizes)} on {what}"
        heads = heads_of(node, length)
        if count is not None:
            yield from _shards_refuse(node, part, length, heads, count, mesh_dim)
            continue
        if isinstance(shards, tuple) and heads and all(own % size for _, own in heads):
            yield Violation(
                f"{part} holds {heads[0][1]} heads ('{heads[0][0]}'), not divisible by {mesh_dim} size {size}",
                f"a {mesh_dim} size that divides the query heads",
            )
            continue
        step = size * length // heads[0][1] if heads else size  # whole heads
        near = [near for near in (length - length % step, length - length % step + step) if near]
        hint = f"sizes that work: {' or '.join(map(str, near))}"
        if heads:
            hint += f", or a {mesh_dim} size that divides its {heads[0][1]} heads ('{heads[0][0]}')"
            if heads[0][0] in KV_HEAD_COUNTS and size % heads[0][1] == 0:
                hint += f", or the same head on several ranks: shards={heads[0][1]}"
        elif packed == 1 and _can_be_padded(node, name, axis) and _is_vocabulary(node, extent):
            hint += f'; a vocabulary can be padded: shard("{name}", axis={axis}, pad=True)'
        yield from Divisible(part, length, mesh_dim, hint)(node)


def _groups_are_cut(
    node: Node, what: str, sizes: tuple[int, ...], counts: tuple[int | None, ...], mesh_dim: str
) -> Iterator[Violation]:
    """Why the ranks that share a group, a KV head and its queries, cannot split the queries by heads."""
    groups = len(sizes) // len(counts)
    held = max(1, mesh_size(node, mesh_dim) // groups)
    for number, (length, count) in enumerate(zip(sizes, counts, strict=False), start=1):
        width = next((width for width in head_sizes(node) if length % width == 0), 1)
        if count is None and length // width % held:
            yield Violation(
                f"matrix {number} of each of the {groups} groups on {what} has {length // width} heads of {width} "
                f"elements, not divisible by the {held} ranks that would hold the same group",
                f"a {mesh_dim} size that divides the query heads",
            )


def _shards_refuse(
    node: Node, part: str, length: int, heads: list[tuple[str, int]], shards: int, mesh_dim: str
) -> Iterator[Violation]:
    """Why one matrix cannot be split into so many shards, or its heads not be shared by the ranks."""
    size = mesh_size(node, mesh_dim)
    if length % shards:
        yield Violation(f"{part} has {length} elements, not divisible by shards={shards}", "a divisor of its size")
    elif size > shards and heads and all(count != shards for _, count in heads):
        name, count = heads[0]
        hint = f"use shards={count}" if name in KV_HEAD_COUNTS else "leave shards out: it is for keys and values"
        if part.startswith("matrix "):
            hint += f"; of packed matrices give one number for each: shards=(None, {shards}, {shards})"
        yield Violation(
            f"{part} holds {count} heads ('{name}'), not one in each shard (got shards={shards}, "
            f"{mesh_dim} size {size})",
            hint,
        )
    elif size > shards and not heads and (found := queries_and_keys(node, length)) is not None:
        queries, kv, width = found
        counts = f"shards=(None, {kv}, {kv})"
        hint = f"write packed=({queries * width}, {kv * width}, {kv * width}), {counts}"
        if kv > 1 and queries % kv == 0:
            hint += (
                f"; or, where the queries of each KV head lie before its key and value, "
                f"packed=({queries // kv * width}, {width}, {width}), {counts}"
            )
        yield Violation(
            f"{part} holds queries, keys and values: with shards={shards} and {mesh_dim} size {size} several ranks "
            "would compute the same queries",
            hint if kv < queries else "leave shards out: each query head has its own key and value",
        )


def _cannot_be_shared(node: Node, name: str, axis: int) -> Iterator[Violation]:
    """Why several ranks cannot hold the same shard: some layer with the tensor sums or combines its shards."""
    for place, own in sites(node, name):
        kind = layer_type_of(place.module)
        if kind is None or own not in (kind.weight, *kind.together) or kind.role(axis) == "output":
            continue
        where = "" if place is node else f" of '{place.path}', tied to it,"
        yield Violation(
            f"axis {axis} of '{own}'{where} is the {kind.role(axis)} axis of {kind.name}: shards= is for output "
            "features only",
            "leave shards out",
        )


def _module_refuses(
    node: Node, place: Node, name: str, axis: int, packed: Packed, mesh_dim: str
) -> Iterator[Violation]:
    """Why the module at ``place``, which holds the tensor as ``name``, could not run with a shard of it."""
    attention = place if isinstance(place.module, nn.MultiheadAttention) else place.parent
    if attention is not None and reads_weights_itself(attention.module, place.module):
        what = f", so '{place.path}' is never called" if attention is not place else ""
        yield Violation(
            f"nn.MultiheadAttention reads all of its weights in one function, which splits them by embed_dim{what}",
            f"write sch['{attention.path}'].replace(...) with an attention of separate projections, and shard those",
        )
        return
    kind = layer_type_of(place.module)
    if kind is None:
        if isinstance(place.module, nn.Embedding) and name == "weight" and axis == 0:
            yield Violation(
                f"the forward of {type(place.module).__name__} does not call that of nn.Embedding by super(), and "
                "would look up the ids of all ranks in the rows of one",
                f"split its features, axis=1, or write sch['{place.path}'].replace(...) with an nn.Embedding",
            )
        elif place is not node:
            yield Violation(
                f"'{name}' of '{place.path}' is the same tensor, and what {type(place.module).__name__} does with it "
                "is not known",
                f"if it works with a shard, write sch['{place.path}'].shard('{name}', axis={axis}) instead of this",
            )
        return
    if name == kind.weight:
        for refusal in kind.refusals(place.module, axis):
            yield (
                refusal
                if place is node
                else Violation(f"at '{place.path}', tied to it: {refusal.message}", refusal.hint)
            )
        yield from _forward_refuses(place, kind, axis, packed, mesh_dim)
    elif name == "bias" and output_axis_is_not_split(place, kind, mesh_dim):
        yield Violation(
            "the weight is split on its input axis, so the whole bias is added once, by sync", "leave 'bias' out"
        )


def output_axis_is_not_split(place: Node, kind: LayerType, mesh_dim: str) -> bool:
    """Whether the weight is split over ``mesh_dim`` on another axis than that of the bias."""
    if own_tensor(place, kind.weight) is None:
        return False
    axis = split_axis(place, kind.weight, mesh_dim)
    return axis is not None and kind.role(axis) not in ("output", "channel")


def _forward_refuses(place: Node, kind: LayerType, axis: int, packed: Packed, mesh_dim: str) -> Iterator[Violation]:
    role, bias = kind.role(axis), own_tensor(place, "bias")
    if role == "channel" and hasattr(place.module, "groups"):
        yield from _groups_refuse(place, kind, packed, mesh_dim)
    if role == "vocabulary" and packed != 1:
        yield Violation(f"the vocabulary of {kind.name} is one matrix (got packed={packed})", "leave packed out")
    if kind.sums_over(axis) and bias is not None and split_axis(place, "bias", mesh_dim) is not None:
        yield Violation(
            "the bias is split already, which belongs to the weight's output axis", f"use axis={kind.axis_of('output')}"
        )
    if (role == "vocabulary" or (kind.sums_over(axis) and bias is not None)) and not place.runs_own_forward:
        steps = f" by {place.records[-1]}" if place.records else ""
        yield Violation(
            f"the forward of '{place.path}' was changed{steps}, and splitting this axis has to change it too",
            "shard first, then apply the other step",
        )


def _groups_refuse(place: Node, kind: LayerType, packed: Packed, mesh_dim: str) -> Iterator[Violation]:
    """Refuse to split inside of a group of a convolution, or to leave a rank a single group."""
    module, size = place.module, mesh_size(place, mesh_dim)
    groups, channels = int(module.groups), int(module.out_channels)  # type: ignore[arg-type]
    if isinstance(packed, int) and (packed < 1 or channels % packed):
        return  # said by _indivisible
    if any(extent % (channels // groups * size) for extent in packed_sizes(packed, channels)):
        of = "" if packed == 1 else f" in packed={packed}"
        yield Violation(
            f"{kind.name} has {groups} groups{of}, not divisible by {mesh_dim} size {size}",
            f"a {mesh_dim} size that divides the groups",
        )
    elif groups == size > 1:
        yield Violation(
            f"each rank would hold one of the {groups} groups, a layer without groups to every later step",
            f"a {mesh_dim} size below {groups}",
        )


@dataclass(frozen=True)
class Shard(Primitive):
    """Keep only this rank's shard of a parameter or buffer, split evenly along one axis.

    Every place that is tied to the tensor changes with it. Of nn.Linear, nn.Embedding, nn.Conv1d/2d/3d,
    nn.BatchNorm1d/2d/3d, transformers' Conv1D and what ``slapo_tp.register_layer`` names, the size attributes and the
    forward follow; of a subclass of torch's whose forward calls theirs by ``super()``, that call. Of any other module
    only the tensor is cut, and the record says so.

    Args:
        names: the module's own parameters or buffers, e.g. ``"weight"`` or ``["weight", "bias"]``; of nn.BatchNorm
            all that it has: ``["weight", "bias", "running_mean", "running_var"]``.
        axis: the tensor's axis to split; negative counts from the end. For ``["weight", "bias"]`` it is the weight's:
            the bias goes along with the weight's output axis, e.g. ``axis=0`` of nn.Linear, ``axis=1`` of Conv1D.
        packed: the axis holds several matrices one after the other, each split separately: how many of the
            same size, e.g. ``3`` for a fused query-key-value weight, or their sizes in elements, e.g.
            ``(768, 256, 256)``.
        mesh_dim: the mesh dimension to split over.
        pad: append zeros to the rows of an nn.Embedding, or to the output axis of an nn.Linear (tied or not, with its
            bias), where their number is not divisible by the ranks: the last ranks hold them, and every rank has a
            tensor of equal size. State dicts and checkpoints have the reference model's shapes, ``sync("fwd_post",
            "all_gather")`` cuts the padding off, and its gradient is zero, so that it stays zero. (A function given
            to ``sync`` gets the padding.)
        shards: number of different shards where the ranks are more, e.g. the number of KV heads: consecutive ranks hold
            the same shard, each uses it for its own query heads, and its gradients are summed over them. Of fewer
            ranks each holds its own part, as without it. For the output axis; each ``packed`` matrix has as many. The
            query heads for each KV head of the attention around (``num_key_value_groups``, ``n_rep``) are divided by
            the holders; other attributes by ``shard_attribute(..., holders_of=)``. Of fused queries, keys and values
            one number for each packed matrix, None for one shard a rank: ``packed=(64, 16, 16), shards=(None, 2, 2)``;
            the same, with the sizes of one of the 2 groups, ``packed=(32, 8, 8)``, where the queries of each KV head
            lie before its key and value (Falcon).

    Raises:
        PreconditionError: no mesh, no such tensor or axis, split already, a size that cannot be divided evenly, or a
            module whose forward cannot work with a shard; each with the call to write instead.

    rewrite: (n ranks, this one is rank r, ``w[r]`` its shard)
        ``Linear, Conv1D, Conv, output axis``: ``x (..., i) -> x w^T + b (..., o)`` -> ``x w[r]^T + b[r] (..., o/n)``:
        the output is split; follow with ``sync("fwd_post", "all_gather")``, or feed an input split layer

        ``the same, input axis``: ``x (..., i) -> x w^T + b (..., o)`` -> ``x[r] (..., i/n) -> x[r] w[r]^T (..., o)``:
        the output is a partial sum without the bias; follow with ``sync("fwd_post", "all_reduce")``, which adds it once

        ``Embedding, axis 0``: ``w[ids] (..., e)`` -> ``w[r][ids]``, zeros for other ranks' ids: a partial sum

        ``Embedding, axis 1``: ``w[ids] (..., e)`` -> ``w[r][ids] (..., e/n)``: the output is split

        ``BatchNorm, axis 0``: ``x (n, c, ...) -> y (n, c, ...)`` -> ``x[r] (n, c/n, ...) -> y[r] (n, c/n, ...)``: each
        channel separately, with its running statistics; between layers split on their output and on their input axis

        ``Conv with groups, axis 0``: as BatchNorm: each rank convolves the channels of its groups

        ``pad=True``: as above with ``w`` of ``v`` rows followed by zeros up to ``n ceil(v/n)`` rows

        ``shards=k < n``: as above with ``w[r]`` the shard ``r // (n/k)`` of k, and ``w[r].grad`` summed over the ranks
        that hold it; of ``shards=(None, k, k)`` those parts of it that several ranks hold

    On a mesh dimension of one rank the layout is recorded, and nothing else changes.

    Source: paper section 3.2.2, ``.shard(param, axis)``; section 2.2, "Tensor parallelism".
    """

    name = "tp.shard"
    equivalence = Equivalence.REORDERED

    names: str | tuple[str, ...]
    axis: int
    packed: int | tuple[int, ...] = dataclasses.field(default=1, kw_only=True)
    mesh_dim: str = dataclasses.field(default="tp", kw_only=True)
    pad: bool = dataclasses.field(default=False, kw_only=True)
    shards: int | tuple[int | None, ...] | None = dataclasses.field(default=None, kw_only=True)

    def preconditions(self, node: Node) -> Iterator[Violation]:
        unplaced = list(Distributed(self.mesh_dim)(node))
        if unplaced:
            yield from unplaced
            return
        names = as_tuple(self.names)
        yield from names_violations(names)
        uneven = list(counts_violations(self.shards, self.packed))
        uneven = uneven or list(shards_violations(node, self.mesh_dim, most_shards(self.shards), "shards"))
        if uneven:
            yield from uneven
            return
        for name in dict.fromkeys(names):
            yield from tensor_violations(
                node, name, names, self.axis, self.packed, self.mesh_dim, pad=self.pad, shards=self.shards
            )
        yield from together_violations(node, names)
        for attribute, groups in head_groups(node).items():
            if groups % self._holders(node):
                yield Violation(
                    f"'{attribute}' of the attention around it, its query heads for each KV head, is {groups}, not "
                    f"divisible by the {self._holders(node)} ranks that would hold the same one",
                    f"a {self.mesh_dim} size that divides the query heads",
                )

    def apply(self, node: Node, edit: Edit) -> None:
        if mesh_size(node, self.mesh_dim) == 1:
            edit.note(f"mesh_dim '{self.mesh_dim}' has one rank: nothing to split")
        names = as_tuple(self.names)
        shared: dict[str, tuple[Node, list[str]]] = {}
        for name in names:
            axis = tensor_axis(node, name, names, self.axis)
            assert axis is not None
            places = sites(node, name)
            self._cut(node, edit, name, axis)
            for place, own in places:
                self._follow(place, edit, own, axis)
                if own in place.parameters:
                    shared.setdefault(place.path, (place, []))[1].append(own)
        for place, own_names in shared.values() if self.shards is not None else ():
            self._sum_over_holders(place, edit, tuple(own_names))
        for attribute, groups in head_groups(node).items() if self.shards is not None else ():
            assert node.parent is not None
            edit.set_attribute(node.parent, attribute, groups // self._holders(node))

    def postconditions(self, node: Node) -> Iterator[Violation]:
        for name in as_tuple(self.names):
            tensor, layout = own_tensor(node, name), node.layout(name)
            if split_axis(node, name, self.mesh_dim) is None:
                yield Violation(f"the layout of '{name}' does not say that it is split: {layout}")
            elif tensor is None or tuple(tensor.shape) != layout.local_shape(node.mesh):
                shape = None if tensor is None else tuple(tensor.shape)
                yield Violation(f"'{name}' must have shape {layout.local_shape(node.mesh)} (got {shape})")

    def _sum_over_holders(self, node: Node, edit: Edit, names: tuple[str, ...]) -> None:
        """Sum the gradients that parameters get from a module over the ranks that hold the same shard."""
        assert node.mesh is not None
        held, among = self._holders(node), RankGroup.along(node.mesh, self.mesh_dim)
        by_group: dict[RankGroup, list[str]] = {}
        for name in names:
            parts = [part for part in node.layout(name).parts(node.mesh) if part.mesh_dim == self.mesh_dim]
            lengths, are_shared = tuple(part.length for part in parts), tuple(len(part.places) > 1 for part in parts)
            shared = (parts[0].axis, lengths, are_shared) if parts else None
            by_group.setdefault(dataclasses.replace(among, holders=held, parts=shared), []).append(name)
        for group, together in by_group.items():
            wrapper = functools.partial(gradients_summed, names=tuple(together), group=group)
            edit.wrap_forward(node, wrapper, active=held > 1)

    def _holders(self, node: Node) -> int:
        """Number of ranks that hold the same shard, or the same keys and values of it."""
        shards = most_shards(self.shards)
        return 1 if shards is None else max(1, mesh_size(node, self.mesh_dim) // shards)

    def _cut(self, node: Node, edit: Edit, name: str, axis: int) -> None:
        """Replace the tensor by this rank's shard, wherever it is tied."""
        from torch.distributed.tensor import Shard as ShardPlacement  # brings sympy along

        old = own_tensor(node, name)
        assert old is not None
        sizes = packed_sizes(self.packed, old.shape[axis], self.shards)
        placements = ((self.mesh_dim, ShardPlacement(axis)),)
        packing = ((axis, sizes),) if len(sizes) > 1 else ()
        counts = ((self.mesh_dim, self.shards),) if self.shards is not None else ()
        missing = -old.shape[axis] % mesh_size(node, self.mesh_dim) if self.pad else 0
        padding = ((axis, missing),) if missing else ()
        before = node.layout(name)
        layout = dataclasses.replace(
            before,
            placements=(*before.placements, *placements),
            packing=(*before.packing, *packing),
            padding=(*before.padding, *padding),
            shard_counts=(*before.shard_counts, *counts),
        )
        if mesh_size(node, self.mesh_dim) == 1:
            edit.set_layout(node, name, layout)
            return
        shard = Layout(before.origin, tuple(old.shape), placements, packing, padding, counts).local(old, node.mesh)
        if name in node.parameters:
            edit.set_parameter(node, name, shard, layout=layout)
        else:
            edit.set_buffer(node, name, shard, layout=layout)

    def _follow(self, node: Node, edit: Edit, name: str, axis: int) -> None:
        """Let a module that holds the tensor tell the truth about it, and run with it."""
        kind = layer_type_of(node.module)
        if kind is None:
            edit.note(
                f"unknown layer type {type(node.module).__name__}: only the tensor was sharded; its forward and size "
                "attributes are unchanged (slapo_tp.register_layer names it)"
            )
            return
        sized = sized_tensor(node, kind)
        if name != sized:
            if sized is None:
                edit.note(
                    f"the weight of '{node.path}' is computed from other tensors (weight_norm, a parametrization): its "
                    "forward and attributes stay, and sync needs its op"
                )
            return
        weight = own_tensor(node, name)
        assert weight is not None
        active = mesh_size(node, self.mesh_dim) > 1
        part = kind.axes[axis]
        if isinstance(kind, SubclassType):
            edit.note(
                f"{type(node.module).__name__} calls the forward of {kind.name}; its size attributes are unchanged"
            )
        elif part is not None and part.attribute is not None:
            edit.set_attribute(node, part.attribute, weight.shape[axis])
        for attribute in part.divided if part is not None else ():
            edit.set_attribute(node, attribute, getattr(node.module, attribute) // mesh_size(node, self.mesh_dim))
        bias, role = own_tensor(node, "bias"), kind.role(axis)
        if role == "vocabulary":
            start = weight.shape[0] * (node.mesh.rank(self.mesh_dim) if node.mesh else 0)
            rows = look_up_own_rows_below if isinstance(kind, SubclassType) else look_up_own_rows
            edit.wrap_forward(node, rows(start, node.layout(name).shape[0]), active=active, inside=True)
        elif kind.sums_over(axis) and bias is not None and kind.without_bias is not None:
            edit.wrap_forward(node, leave_bias_out(kind.without_bias), active=active, inside=True)
        elif (
            role == "output"
            and bias is not None
            and "bias" not in as_tuple(self.names)
            and split_axis(node, "bias", self.mesh_dim) is None
        ):
            shards = f", shards={self.shards}" if self.shards is not None else ""
            shards = f", packed={self.packed}{shards}" if isinstance(self.shards, tuple) else shards
            edit.note(f"the bias of '{node.path}' is whole still: shard('bias', axis=0{shards}) belongs to this")
