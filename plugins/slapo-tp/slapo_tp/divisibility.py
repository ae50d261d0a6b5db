"""Refuse uneven splits: of sizes, packed matrices, attention heads and groups."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from slapo_core import Node, Violation
from slapo_tp.heads import KV_HEAD_COUNTS, head_sizes, heads_of, queries_and_keys
from slapo_tp.layers import EMBEDDING, LINEAR, LayerType, layer_type_of
from slapo_tp.preconditions import Divisible
from slapo_tp.split_state import root_of, sites
from slapo_tp.splits import Split, common_count, packed_sizes


def size_violations(node: Node, split: Split) -> Iterator[Violation]:
    """Refuse matrices, and heads in them, that the ranks cannot share evenly."""
    what = f"axis {split.axis} of '{split.name}'"
    if isinstance(split.packed, tuple):
        if sum(split.sizes) != split.extent or min(split.packed, default=0) < 1:
            counts = split.shards
            groups = f", for each of {common_count(counts)} groups or in all" if isinstance(counts, tuple) else ""
            yield Violation(
                f"{what} has {split.extent} elements, but packed={split.packed} gives {sum(split.packed)}{groups}",
                "packed lists the size of each matrix on that axis, in elements",
            )
            return
    elif split.packed < 1 or split.extent % split.packed:
        yield Violation(
            f"{what} has {split.extent} elements, not divisible by packed={split.packed}",
            "give the size of each matrix, e.g. packed=(768, 256, 256)",
        )
        return
    if len(split.counts) < len(split.sizes):
        yield from _group_violations(node, split, what)
        return
    for number, (length, count) in enumerate(zip(split.sizes, split.counts, strict=True), start=1):
        part = what if len(split.sizes) == 1 else f"matrix {number} of {len(split.sizes)} on {what}"
        if count is None:
            yield from _matrix_violations(node, split, part, length)
        else:
            yield from _shared_matrix_violations(node, split, part, length, count)


def _matrix_violations(node: Node, split: Split, part: str, length: int) -> Iterator[Violation]:
    """Refuse a matrix whose elements or heads the ranks do not divide."""
    mesh_dim, size, heads = split.mesh_dim, split.ranks, heads_of(node, length)
    if isinstance(split.shards, tuple) and heads and all(own % size for _, own in heads):
        yield Violation(
            f"{part} holds {heads[0][1]} heads ('{heads[0][0]}'), not divisible by {mesh_dim} size {size}",
            f"a {mesh_dim} size that divides the query heads",
        )
        return
    step = size * length // heads[0][1] if heads else size  # no head is cut
    near = [near for near in (length - length % step, length - length % step + step) if near]
    hint = f"sizes that work: {' or '.join(map(str, near))}"
    if heads:
        hint += f", or a {mesh_dim} size that divides its {heads[0][1]} heads ('{heads[0][0]}')"
        if heads[0][0] in KV_HEAD_COUNTS and size % heads[0][1] == 0:
            hint += f", or the same head on several ranks: shards={heads[0][1]}"
    elif split.packed == 1 and can_be_padded(node, split) and _is_vocabulary(node, split.extent):
        hint += f'; a vocabulary can be padded: shard("{split.name}", axis={split.axis}, pad=True)'
    yield from Divisible(part, length, mesh_dim, hint)(node)


def _shared_matrix_violations(node: Node, split: Split, part: str, length: int, shards: int) -> Iterator[Violation]:
    """Refuse uneven shards of a matrix, and shared ones of other than one head."""
    mesh_dim, size, heads = split.mesh_dim, split.ranks, heads_of(node, length)
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


def _group_violations(node: Node, split: Split, what: str) -> Iterator[Violation]:
    """Refuse groups (a KV head and its queries) whose ranks cut a head."""
    groups = len(split.sizes) // len(split.counts)
    holders = max(1, split.ranks // groups)
    for number, (length, count) in enumerate(zip(split.sizes, split.counts, strict=False), start=1):
        width = next((width for width in head_sizes(node) if length % width == 0), 1)
        if count is None and length // width % holders:
            yield Violation(
                f"matrix {number} of each of the {groups} groups on {what} has {length // width} heads of {width} "
                f"elements, not divisible by the {holders} ranks that would hold the same group",
                f"a {split.mesh_dim} size that divides the query heads",
            )


def padding_violations(node: Node, split: Split) -> Iterator[Violation]:
    """Refuse padding of shared or packed shards, and of unsupported axes."""
    if split.shards is not None:
        yield Violation(f"pad=True is for one shard a rank (got shards={split.shards})", "leave one of them out")
    elif split.packed != 1 or not can_be_padded(node, split):
        place = f"axis {split.axis} of '{split.name}' of {type(node.module).__name__}"
        yield Violation(
            "pad=True is for the rows of nn.Embedding and the output axis of nn.Linear "
            f"(got {place if split.packed == 1 else f'packed={split.packed}'})",
            "leave pad out",
        )


def can_be_padded(node: Node, split: Split) -> bool:
    """Return whether the axis is the rows or outputs of all known layers."""
    types = [(layer_type_of(place.module), own) for place, own in sites(node, split.name)]
    known = [(kind, own) for kind, own in types if kind is not None]
    return (
        bool(known)
        and split.axis == 0
        and all(kind.name in (LINEAR.name, EMBEDDING.name) and own in ("weight", "bias") for kind, own in known)
    )


def _is_vocabulary(node: Node, rows: int) -> bool:
    """Return whether an embedding of the model has as many rows."""
    embeddings = (each for each in root_of(node).walk() if isinstance(each.module, nn.Embedding))
    return any(each.layout("weight").shape[0] == rows for each in embeddings if "weight" in each.parameters)


def channel_violations(place: Node, kind: LayerType, split: Split) -> Iterator[Violation]:
    """Refuse to split inside of a convolution's group, or one group a rank."""
    module, size, packed = place.module, split.ranks, split.packed
    groups, channels = int(module.groups), int(module.out_channels)  # type: ignore[arg-type]
    if isinstance(packed, int) and (packed < 1 or channels % packed):
        return  # refused by size_violations
    if any(extent % (channels // groups * size) for extent in packed_sizes(packed, channels)):
        of = "" if packed == 1 else f" in packed={packed}"
        yield Violation(
            f"{kind.name} has {groups} groups{of}, not divisible by {split.mesh_dim} size {size}",
            f"a {split.mesh_dim} size that divides the groups",
        )
    elif groups == size > 1:
        yield Violation(
            f"each rank would hold one of the {groups} groups, a layer without groups to every later step",
            f"a {split.mesh_dim} size below {groups}",
        )
