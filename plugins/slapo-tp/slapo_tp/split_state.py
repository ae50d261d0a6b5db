"""Read from layouts which tensors are split, and which outputs are partial.

Layouts are recorded on a mesh of size 1 too: a schedule that is right there is right everywhere.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.parameter import is_lazy

from slapo_core import Node
from slapo_core.internals import buffers_of, parameters_of
from slapo_tp.layers import LayerType, layer_type_of


def mesh_size(node: Node, mesh_dim: str) -> int:
    """Return the number of ranks along ``mesh_dim``."""
    return node.mesh.size(mesh_dim) if node.mesh is not None else 1


def root_of(node: Node) -> Node:
    """Return the node of the model itself."""
    while node.parent is not None:
        node = node.parent
    return node


def own_tensor(node: Node, name: str) -> Tensor | None:
    """Return the module's own parameter or buffer; None if missing."""
    module = node.module
    tensor = parameters_of(module).get(name)
    return buffers_of(module).get(name) if tensor is None else tensor


def sites(node: Node, name: str) -> tuple[tuple[Node, str], ...]:
    """Return every module with the tensor, ``node`` first, and its name there."""
    places = node.ties(name)
    if len(places) < 2:
        return ((node, name),)
    root = root_of(node)
    found = [place.rpartition(".") for place in places]
    others = [(root[path], own) for path, _, own in found if (path, own) != (node.path, name)]
    return ((node, name), *others)


def sized_tensor(node: Node, kind: LayerType) -> str | None:
    """Return the name of the tensor that the layer type's axes describe."""
    return next((name for name in (kind.weight, *kind.together) if own_tensor(node, name) is not None), None)


def weight_name(node: Node) -> str:
    """Return the layer type's name of the weight; ``"weight"`` without a type."""
    kind = layer_type_of(node.module)
    return kind.weight if kind is not None else "weight"


def split_together(node: Node) -> tuple[str, ...]:
    """Return the tensors that one step must split together, if any."""
    kind = layer_type_of(node.module)
    return tuple(name for name in kind.together if own_tensor(node, name) is not None) if kind is not None else ()


def split_axis(node: Node, name: str, mesh_dim: str) -> int | None:
    """Return the axis of an own tensor that ``mesh_dim`` splits; None if unsplit."""
    tensor = own_tensor(node, name)
    if tensor is None or is_lazy(tensor):
        return None
    return next((axis for split_dim, axis in node.layout(name).shards() if split_dim == mesh_dim), None)


def holders(node: Node, name: str, mesh_dim: str) -> int:
    """Return the number of ranks with the same shard; 1 if unsplit."""
    if split_axis(node, name, mesh_dim) is None:
        return 1
    return len(node.layout(name).holders(node.mesh, mesh_dim))


def most_holders(node: Node, name: str, mesh_dim: str) -> int:
    """Return the largest number of ranks with the same part of a shard."""
    if split_axis(node, name, mesh_dim) is None:
        return 1
    parts = [len(part.places) for part in node.layout(name).parts(node.mesh) if part.mesh_dim == mesh_dim]
    return max(parts, default=holders(node, name, mesh_dim))


def has_split_below(node: Node, mesh_dim: str) -> bool:
    """Return whether a tensor here or below is split over ``mesh_dim``."""
    return any(
        split_axis(below, name, mesh_dim) is not None
        for below in node.walk()
        for name in (*parameters_of(below.module), *buffers_of(below.module))
    )


def output_state(node: Node, mesh_dim: str) -> Literal["partial", "split"] | None:
    """Return whether the output is a partial sum or a shard; else None.

    None, too, for a module of unknown type.
    """
    kind = layer_type_of(node.module)
    name = sized_tensor(node, kind) if kind is not None else None
    axis = split_axis(node, name, mesh_dim) if name is not None else None
    if kind is None or axis is None:
        return None
    return "split" if kind.role(axis) in ("output", "channel") else "partial"


def makes_gradient_partial(node: Node, mesh_dim: str) -> bool:
    """Return whether the gradient of the module's input is partial."""
    kind, state = layer_type_of(node.module), output_state(node, mesh_dim)
    if kind is None or state is None:
        return False
    is_hidden = state == "partial" and kind.axis_of("hidden") is not None
    return is_hidden or (state == "split" and kind.axis_of("input") is not None)


def gathers_itself(node: Node) -> bool:
    """Return whether a step at the layer gathers its output shards itself."""
    return any(getattr(wrapper, "slapo_gathers_output", False) for wrapper in node.wrappers)


def bias_is_left_out(node: Node, mesh_dim: str) -> bool:
    """Return whether the module leaves its bias to ``sync``."""
    return own_tensor(node, "bias") is not None and output_state(node, mesh_dim) == "partial"


def as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return one name or several as a tuple."""
    return (names,) if isinstance(names, str) else names
