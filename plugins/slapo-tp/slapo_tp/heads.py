"""Read the heads of the attention around a layer from its attributes."""

from __future__ import annotations

from torch import nn

from slapo_core import Node

KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", *KV_HEAD_COUNTS, "n_heads", "n_head")
_HEAD_SIZES = ("head_dim", "attention_head_size", "head_size")

HEAD_GROUPS = ("num_key_value_groups", "n_rep", "num_queries_per_kv")


def heads_of(node: Node, extent: int) -> list[tuple[str, int]]:
    """Return the head counts, by attribute, that divide ``extent`` features into heads."""
    counts, widths = _heads_around(node)
    return [(name, heads) for name, heads in counts if any(extent == heads * width for width in widths)]


def queries_and_keys(node: Node, extent: int) -> tuple[int, int, int] | None:
    """Return query heads, KV heads and head size of a fused projection."""
    counts, widths = _heads_around(node)
    keys = [heads for name, heads in counts if name in KV_HEAD_COUNTS]
    queries = [heads for name, heads in counts if name not in KV_HEAD_COUNTS]
    triples = [(count, kv, width) for count in queries for kv in (*keys, 1, count) for width in widths]
    return next((found for found in triples if extent == (found[0] + 2 * found[1]) * found[2]), None)


def head_sizes(node: Node) -> list[int]:
    """Return the head sizes of the attention around a layer, in elements."""
    return _heads_around(node)[1]


def _heads_around(node: Node) -> tuple[list[tuple[str, int]], list[int]]:
    """Return head counts, by attribute, and head sizes of the attention around."""
    attention = node.parent.module if node.parent is not None else nn.Identity()
    known = {**vars(getattr(attention, "config", None) or nn.Identity()), **vars(attention)}
    widths = [known[name] for name in _HEAD_SIZES if type(known.get(name)) is int]
    counts = [(name, known[name]) for name in _HEAD_COUNTS if type(known.get(name)) is int and known[name] > 0]
    return counts, widths


def head_groups(node: Node) -> tuple[Node, dict[str, int]]:
    """Return the attention around, and its attributes that count query heads for each KV head.

    A module between (Moshi has its layers in modules of their own) has no such attributes. Those changed by a step are
    left out.
    """
    around = node.parent if node.parent is not None else node
    if around.parent is not None and vars(around.module).keys().isdisjoint(HEAD_GROUPS):
        around = around.parent
    own = {name: vars(around.module).get(name) for name in HEAD_GROUPS if name not in around.changed_attributes}
    return around, {name: value for name, value in own.items() if type(value) is int}
