"""Answer which tensors are split, and the state of a module's output.

The answers come from the layouts alone, which are recorded on a mesh of size 1 too: a schedule that is right there is
right everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from slapo_core import Node, Violation
from slapo_tp.layers import LayerType, layer_type_of
from slapo_tp.private import buffers_of, parameters_of


def mesh_size(node: Node, mesh_dim: str) -> int:
    """Number of ranks along ``mesh_dim``."""
    return node.mesh.size(mesh_dim) if node.mesh is not None else 1


def own_tensor(node: Node, name: str) -> Tensor | None:
    """The module's own parameter or buffer; None if it has none of that name."""
    module = node.module
    tensor = parameters_of(module).get(name)
    return buffers_of(module).get(name) if tensor is None else tensor


def sites(node: Node, name: str) -> tuple[tuple[Node, str], ...]:
    """Every module that holds the tensor, with its name there; ``node`` itself first."""
    places = node.ties(name)
    if len(places) < 2:
        return ((node, name),)
    root = node
    while root.parent is not None:
        root = root.parent
    found = [place.rpartition(".") for place in places]
    others = [(root[path], own) for path, _, own in found if (path, own) != (node.path, name)]
    return ((node, name), *others)


def tensor_axis(node: Node, name: str, names: tuple[str, ...], axis: int) -> int | None:
    """The axis of tensor ``name`` that ``shard(names, axis=axis)`` means; None if there is none.

    ``axis`` counts the axes of the weight. A bias has only one axis, that of the output features, so it is split on its
    axis 0 when the weight is split on its output axis, whichever that is (1 for transformers' Conv1D).
    """
    tensor = own_tensor(node, name)
    assert tensor is not None
    kind = layer_type_of(node.module)
    weight = own_tensor(node, kind.weight) if kind is not None else None
    along_weight = (kind is not None and kind.weight in names) or not -1 <= axis < 1
    if name == "bias" and tensor.dim() == 1 and kind is not None and weight is not None and along_weight:
        position = _normalize(axis, weight.dim())
        return 0 if position is not None and kind.role(position) in ("output", "channel") else None
    return _normalize(axis, tensor.dim())


def sized_tensor(node: Node, kind: LayerType) -> str | None:
    """Return the tensor of the layer type's axes: the weight, or another tensor of a norm; None if missing."""
    return next((name for name in (kind.weight, *kind.together) if own_tensor(node, name) is not None), None)


def weight_name(node: Node) -> str:
    """Return the name of the tensor that the layer type describes; ``"weight"`` without a type."""
    kind = layer_type_of(node.module)
    return kind.weight if kind is not None else "weight"


def split_together(node: Node) -> tuple[str, ...]:
    """The tensors of the module that one step must split together; empty for most kinds."""
    kind = layer_type_of(node.module)
    return tuple(name for name in kind.together if own_tensor(node, name) is not None) if kind is not None else ()


def split_axis(node: Node, name: str, mesh_dim: str) -> int | None:
    """The axis along which an own tensor was split over ``mesh_dim``; None if it was not."""
    tensor = own_tensor(node, name)
    if tensor is None or is_lazy(tensor):
        return None
    return next((axis for split_dim, axis in node.layout(name).shards() if split_dim == mesh_dim), None)


def holders(node: Node, name: str, mesh_dim: str) -> int:
    """Number of ranks along ``mesh_dim`` that hold the same shard of an own tensor; 1 where it is not split."""
    if split_axis(node, name, mesh_dim) is None:
        return 1
    return len(node.layout(name).holders(node.mesh, mesh_dim))


def most_holders(node: Node, name: str, mesh_dim: str) -> int:
    """Number of ranks along ``mesh_dim`` that hold the same part of an own tensor, of the part with the most."""
    if split_axis(node, name, mesh_dim) is None:
        return 1
    parts = [len(part.places) for part in node.layout(name).parts(node.mesh) if part.mesh_dim == mesh_dim]
    return max(parts, default=holders(node, name, mesh_dim))


def shards_violations(node: Node, mesh_dim: str, shards: int | None, argument: str) -> Iterator[Violation]:
    """Yield why the ranks along ``mesh_dim`` cannot hold so many different shards, each on as many ranks."""
    size = mesh_size(node, mesh_dim)
    if shards is not None and shards < 1:
        yield Violation(f"{argument} must be positive (got {shards})", f"leave {argument} out for one shard a rank")
    elif shards is not None and size % shards and shards % size:
        yield Violation(
            f"{argument}={shards} and {mesh_dim} size {size}: neither divides the other",
            f"a {mesh_dim} size that divides {shards}, or a multiple of it",
        )


def has_split_below(node: Node, mesh_dim: str) -> bool:
    """Whether a tensor here or at any descendant was split over ``mesh_dim``, be it through a tie."""
    return any(
        split_axis(below, name, mesh_dim) is not None
        for below in node.walk()
        for name in (*parameters_of(below.module), *buffers_of(below.module))
    )


def output_state(node: Node, mesh_dim: str) -> Literal["partial", "split"] | None:
    """Return the state of the forward's output: a partial sum, or a shard of the output features.

    None where it is neither, or where the module is of no known kind.
    """
    kind = layer_type_of(node.module)
    name = sized_tensor(node, kind) if kind is not None else None
    axis = split_axis(node, name, mesh_dim) if name is not None else None
    if kind is None or axis is None:
        return None
    return "split" if kind.role(axis) in ("output", "channel") else "partial"


def makes_gradient_partial(node: Node, mesh_dim: str) -> bool:
    """Whether the module takes full inputs and works on a shard of the features: each rank's ``dx`` is partial."""
    kind, state = layer_type_of(node.module), output_state(node, mesh_dim)
    if kind is None or state is None:
        return False
    is_hidden = state == "partial" and kind.axis_of("hidden") is not None
    return is_hidden or (state == "split" and kind.axis_of("input") is not None)


def gathers_itself(node: Node) -> bool:
    """Whether a step at the layer takes its shards of the output as they are, and gives whole ones."""
    return any(getattr(wrapper, "slapo_gathers_output", False) for wrapper in node.wrappers)


def bias_is_left_out(node: Node, mesh_dim: str) -> bool:
    """Whether the module gives a partial sum without its bias, which ``sync`` has to add."""
    return own_tensor(node, "bias") is not None and output_state(node, mesh_dim) == "partial"


KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", *KV_HEAD_COUNTS, "n_heads", "n_head")
_HEAD_SIZES = ("head_dim", "attention_head_size", "head_size")


def heads_of(node: Node, extent: int) -> list[tuple[str, int]]:
    """Return the attributes of the attention around a layer that say how many heads ``extent`` features are."""
    counts, widths = _heads_around(node)
    return [(name, heads) for name, heads in counts if any(extent == heads * width for width in widths)]


def queries_and_keys(node: Node, extent: int) -> tuple[int, int, int] | None:
    """Return the query heads, KV heads and head size of the attention around a layer whose features are all of them."""
    counts, widths = _heads_around(node)
    keys = [heads for name, heads in counts if name in KV_HEAD_COUNTS]
    queries = [heads for name, heads in counts if name not in KV_HEAD_COUNTS]
    triples = [(count, kv, width) for count in queries for kv in (*keys, 1, count) for width in widths]
    return next((found for found in triples if extent == (found[0] + 2 * found[1]) * found[2]), None)


def head_sizes(node: Node) -> list[int]:
    """Return the sizes of a head that the attention around a layer has, in elements."""
    return _heads_around(node)[1]


def _heads_around(node: Node) -> tuple[list[tuple[str, int]], list[int]]:
    """Return what the attention around a layer says: the numbers of heads by attribute, and the heads' sizes."""
    attention = node.parent.module if node.parent is not None else nn.Identity()
    known = {**vars(getattr(attention, "config", None) or nn.Identity()), **vars(attention)}
    widths = [known[name] for name in _HEAD_SIZES if type(known.get(name)) is int]
    counts = [(name, known[name]) for name in _HEAD_COUNTS if type(known.get(name)) is int and known[name] > 0]
    return counts, widths


HEAD_GROUPS = ("num_key_value_groups", "n_rep", "num_queries_per_kv")


def head_groups(node: Node) -> dict[str, int]:
    """Return the attributes of the attention around a layer that count its query heads for each KV head.

    Without those that a step changed.
    """
    attention = node.parent
    if attention is None:
        return {}
    own = {name: vars(attention.module).get(name) for name in HEAD_GROUPS if name not in attention.changed_attributes}
    return {name: value for name, value in own.items() if type(value) is int}


def as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """One name or several, as several."""
    return (names,) if isinstance(names, str) else names


def _normalize(axis: int, axes: int) -> int | None:
    return axis % axes if -axes <= axis < axes else None
