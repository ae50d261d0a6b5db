"""Keep only this rank's shard of a parameter or buffer: ``shard``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from slapo_core import Edit, Equivalence, Node, Primitive, Violation
from slapo_core.effects import Collective, Effect
from slapo_tp.collectives import RankGroup
from slapo_tp.forwards import leave_bias_out, look_up_own_rows, look_up_own_rows_below
from slapo_tp.heads import head_groups
from slapo_tp.layers import LayerType, SubclassType, layer_type_of
from slapo_tp.preconditions import needs_mesh
from slapo_tp.shard_checks import names_violations, no_such_axis, split_violations, tensor_violation
from slapo_tp.split_state import as_tuple, mesh_size, own_tensor, sites, sized_tensor, split_axis
from slapo_tp.splits import (
    Split,
    common_count,
    counts_violations,
    ranks_per_shard,
    shards_violations,
    tensor_axis,
)
from slapo_tp.sync_gradient import GradientSum


@dataclass(frozen=True)
class Shard(Primitive):
    """Keep this rank's shard of a parameter or buffer, split along one axis.

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

    @needs_mesh
    def preconditions(self, node: Node) -> Iterator[Violation]:
        names = as_tuple(self.names)
        yield from names_violations(node, names)
        uneven = list(counts_violations(self.shards, self.packed))
        uneven = uneven or list(shards_violations(node, self.mesh_dim, common_count(self.shards), "shards"))
        if uneven:
            yield from uneven
            return
        for name in dict.fromkeys(names):
            refusal = tensor_violation(node, name)
            split = self._split(node, name) if refusal is None else None
            if refusal is not None:
                yield refusal
            elif split is None:
                yield no_such_axis(node, name, self.axis)
            else:
                yield from split_violations(node, split)
        holders = ranks_per_shard(mesh_size(node, self.mesh_dim), self.shards)
        for attribute, groups in head_groups(node)[1].items():
            if groups % holders:
                yield Violation(
                    f"'{attribute}' of the attention around it, its query heads for each KV head, is {groups}, not "
                    f"divisible by the {holders} ranks that would hold the same one",
                    f"a {self.mesh_dim} size that divides the query heads",
                )

    def apply(self, node: Node, edit: Edit) -> None:
        if mesh_size(node, self.mesh_dim) == 1:
            edit.note(f"mesh_dim '{self.mesh_dim}' has one rank: nothing to split")
        parameters: dict[str, tuple[Node, list[str]]] = {}
        for name in as_tuple(self.names):
            split = self._split(node, name)
            assert split is not None
            places = sites(node, name)
            _keep_shard(node, edit, split)
            for place, own in places:
                self._update_layer(place, edit, own, split)
                if own in place.parameters:
                    parameters.setdefault(place.path, (place, []))[1].append(own)
        if self.shards is None:
            return
        holders = ranks_per_shard(mesh_size(node, self.mesh_dim), self.shards)
        for place, names in parameters.values():
            self._sum_among_holders(place, edit, names, holders)
        attention, counts = head_groups(node)
        for attribute, groups in counts.items():
            edit.set_attribute(attention, attribute, groups // holders)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        for name in as_tuple(self.names):
            tensor, layout = own_tensor(node, name), node.layout(name)
            if split_axis(node, name, self.mesh_dim) is None:
                yield Violation(f"the layout of '{name}' has no split over '{self.mesh_dim}': {layout}")
            elif tensor is None or tuple(tensor.shape) != layout.local_shape(node.mesh):
                shape = None if tensor is None else tuple(tensor.shape)
                yield Violation(f"'{name}' must have shape {layout.local_shape(node.mesh)} (got {shape})")

    def effects(self, node: Node) -> Iterator[Effect]:
        if ranks_per_shard(mesh_size(node, self.mesh_dim), self.shards) == 1:
            return
        if any(name in node.parameters and node.parameters[name].requires_grad for name in as_tuple(self.names)):
            yield Collective("all_to_all", self.mesh_dim, "backward")

    def _split(self, node: Node, name: str) -> Split | None:
        """Resolve the arguments for one tensor; None without such an axis."""
        tensor, axis = own_tensor(node, name), tensor_axis(node, name, as_tuple(self.names), self.axis)
        if tensor is None or axis is None:
            return None
        ranks = mesh_size(node, self.mesh_dim)
        return Split(name, axis, tensor.shape[axis], self.mesh_dim, ranks, self.packed, self.pad, self.shards)

    def _update_layer(self, node: Node, edit: Edit, name: str, split: Split) -> None:
        """Adapt a module's size attributes and forward to the shard."""
        kind = layer_type_of(node.module)
        if kind is None:
            edit.note(
                f"unknown layer type {type(node.module).__name__}: only the tensor was sharded; its forward and size "
                "attributes are unchanged (slapo_tp.register_layer names it)"
            )
            return
        sized = sized_tensor(node, kind)
        if sized is None:
            edit.note(
                f"the weight of '{node.path}' is computed from other tensors (weight_norm, a parametrization): its "
                "forward and attributes stay, and sync needs its op"
            )
        elif name == sized:
            _set_sizes(node, edit, kind, name, split)
            self._set_forward(node, edit, kind, name, split)

    def _set_forward(self, node: Node, edit: Edit, kind: LayerType, name: str, split: Split) -> None:
        weight, bias, role = own_tensor(node, name), own_tensor(node, "bias"), kind.role(split.axis)
        assert weight is not None
        active = split.ranks > 1
        if role == "vocabulary":
            start = weight.shape[0] * (node.mesh.rank(self.mesh_dim) if node.mesh else 0)
            rows = look_up_own_rows_below if isinstance(kind, SubclassType) else look_up_own_rows
            edit.wrap_forward(node, rows(start, node.layout(name).shape[0]), active=active, inside=True)
        elif kind.sums_over(split.axis) and bias is not None and kind.without_bias is not None:
            edit.wrap_forward(node, leave_bias_out(kind.without_bias), active=active, inside=True)
        elif role == "output" and bias is not None and split_axis(node, "bias", self.mesh_dim) is None:
            shards = f", shards={self.shards}" if self.shards is not None else ""
            shards = f", packed={self.packed}{shards}" if self.packed != 1 else shards
            if "bias" not in as_tuple(self.names):
                edit.note(f"the bias of '{node.path}' is still full: shard('bias', axis=0{shards}) belongs to this")

    def _sum_among_holders(self, node: Node, edit: Edit, names: list[str], holders: int) -> None:
        """Sum parameters' gradients over the ranks with the same shard."""
        assert node.mesh is not None
        along = RankGroup.along(node.mesh, self.mesh_dim)
        by_group: dict[RankGroup, list[str]] = {}
        for name in names:
            parts = [part for part in node.layout(name).parts(node.mesh) if part.mesh_dim == self.mesh_dim]
            lengths, are_shared = tuple(part.length for part in parts), tuple(len(part.places) > 1 for part in parts)
            shared = (parts[0].axis, lengths, are_shared) if parts else None
            by_group.setdefault(dataclasses.replace(along, holders=holders, parts=shared), []).append(name)
        for group, together in by_group.items():
            edit.wrap_forward(node, GradientSum(tuple(together), group), active=holders > 1)


def _keep_shard(node: Node, edit: Edit, split: Split) -> None:
    """Replace the tensor by this rank's shard, wherever it is tied."""
    old, before = own_tensor(node, split.name), node.layout(split.name)
    assert old is not None
    own = split.layout(tuple(old.shape), before)
    layout = dataclasses.replace(
        before,
        placements=(*before.placements, *own.placements),
        packing=(*before.packing, *own.packing),
        padding=(*before.padding, *own.padding),
        shard_counts=(*before.shard_counts, *own.shard_counts),
    )
    if split.ranks == 1:
        edit.set_layout(node, split.name, layout)
    elif split.name in node.parameters:
        edit.set_parameter(node, split.name, own.local(old, node.mesh), layout=layout)
    else:
        edit.set_buffer(node, split.name, own.local(old, node.mesh), layout=layout)


def _set_sizes(node: Node, edit: Edit, kind: LayerType, name: str, split: Split) -> None:
    """Give the module the size attributes of the shard."""
    weight, part = own_tensor(node, name), kind.axes[split.axis]
    assert weight is not None
    if isinstance(kind, SubclassType):
        edit.note(f"{type(node.module).__name__} calls the forward of {kind.name}; its size attributes are unchanged")
    elif part is not None and part.attribute is not None:
        edit.set_attribute(node, part.attribute, weight.shape[split.axis])
    for attribute in part.divided if part is not None else ():
        edit.set_attribute(node, attribute, getattr(node.module, attribute) // split.ranks)
