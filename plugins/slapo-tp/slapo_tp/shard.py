"""``shard``: keep only this rank's piece of a parameter or buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from slapo_core import Edit, Equivalence, Layout, Node, Primitive, Violation
from slapo_core.spec.preconditions import Distributed
from slapo_tp.forwards import leave_bias_out, look_up_own_rows
from slapo_tp.layers import layer_type_of
from slapo_tp.shard_rules import names_violations, pieces, tensor_violations, together_violations
from slapo_tp.splits import as_tuple, mesh_size, own_tensor, sites, sized_tensor, split_axis, tensor_axis

__all__ = ["Shard"]


@dataclass(frozen=True)
class Shard(Primitive):
    """Keep only this rank's piece of a parameter or buffer, split evenly along one axis.

    Every place that is tied to the tensor changes with it. Of nn.Linear, nn.Embedding, nn.Conv1d/2d/3d,
    nn.BatchNorm1d/2d/3d, transformers' Conv1D and what ``slapo_tp.register_layer`` names, the size attributes and the
    forward follow; of any other module only the tensor is cut, and the record says so.

    Args:
        names: the module's own parameters or buffers, e.g. ``"weight"`` or ``["weight", "bias"]``; of nn.BatchNorm
            all that it has: ``["weight", "bias", "running_mean", "running_var"]``.
        axis: the tensor's axis to split; negative counts from the end. For ``["weight", "bias"]`` it is the weight's:
            the bias goes along with the weight's output axis, e.g. ``axis=0`` of nn.Linear, ``axis=1`` of Conv1D.
        packed: the axis holds several matrices one after the other, each of which is split by itself: how many of the
            same size, e.g. ``3`` for a fused query-key-value weight, or their sizes in elements, e.g.
            ``(768, 256, 256)``.
        mesh_dim: the mesh dimension to split over.
        pad: append zeros to the rows of an nn.Embedding, or to the output axis of an nn.Linear (tied or not, with its
            bias), where their number is not divisible by the ranks: the last ranks hold them, and every rank has a
            tensor of one size. State dicts and checkpoints have the reference model's shapes, ``sync("fwd_post",
            "all_gather")`` cuts the padding off, and its gradient is zero, so that it stays zero. (A function given
            to ``sync`` gets the padding.)

    Raises:
        PreconditionError: no mesh, no such tensor or axis, split already, a size that cannot be divided evenly, or a
            module whose forward cannot work with a piece; each with the call to write instead.

    rewrite: (n ranks, this one is rank r, ``w[r]`` its piece)
        ``Linear, Conv1D, Conv, output axis``: ``x (..., i) -> x w^T + b (..., o)`` -> ``x w[r]^T + b[r] (..., o/n)``:
        the output is split; follow with ``sync("fwd_post", "all_gather")``, or feed an input split layer

        ``the same, input axis``: ``x (..., i) -> x w^T + b (..., o)`` -> ``x[r] (..., i/n) -> x[r] w[r]^T (..., o)``:
        the output is a partial sum without the bias; follow with ``sync("fwd_post", "all_reduce")``, which adds it once

        ``Embedding, axis 0``: ``w[ids] (..., e)`` -> ``w[r][ids]``, zeros for other ranks' ids: a partial sum

        ``Embedding, axis 1``: ``w[ids] (..., e)`` -> ``w[r][ids] (..., e/n)``: the output is split

        ``BatchNorm, axis 0``: ``x (n, c, ...) -> y (n, c, ...)`` -> ``x[r] (n, c/n, ...) -> y[r] (n, c/n, ...)``: each
        channel by itself, with its running statistics; between layers split on their output and on their input axis

        ``pad=True``: as above with ``w`` of ``v`` rows followed by zeros up to ``n ceil(v/n)`` rows

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

    def preconditions(self, node: Node) -> Iterator[Violation]:
        unplaced = list(Distributed(self.mesh_dim)(node))
        if unplaced:
            yield from unplaced
            return
        names = as_tuple(self.names)
        yield from names_violations(names)
        for name in dict.fromkeys(names):
            yield from tensor_violations(node, name, names, self.axis, self.packed, self.mesh_dim, pad=self.pad)
        yield from together_violations(node, names)

    def apply(self, node: Node, edit: Edit) -> None:
        if mesh_size(node, self.mesh_dim) == 1:
            edit.note(f"mesh_dim '{self.mesh_dim}' has one rank: nothing to split")
        names = as_tuple(self.names)
        for name in names:
            axis = tensor_axis(node, name, names, self.axis)
            assert axis is not None
            places = sites(node, name)
            self._cut(node, edit, name, axis)
            for place, own in places:
                self._follow(place, edit, own, axis)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        for name in as_tuple(self.names):
            tensor, layout = own_tensor(node, name), node.layout(name)
            if split_axis(node, name, self.mesh_dim) is None:
                yield Violation(f"the layout of '{name}' does not say that it is split: {layout}")
            elif tensor is None or tuple(tensor.shape) != layout.local_shape(node.mesh):
                shape = None if tensor is None else tuple(tensor.shape)
                yield Violation(f"'{name}' must have shape {layout.local_shape(node.mesh)} (got {shape})")

    def _cut(self, node: Node, edit: Edit, name: str, axis: int) -> None:
        """Put this rank's piece in the place of the tensor, everywhere it is tied."""
        from torch.distributed.tensor import Shard as ShardPlacement  # brings sympy along

        old = own_tensor(node, name)
        assert old is not None
        sizes = pieces(self.packed, old.shape[axis])
        placements = ((self.mesh_dim, ShardPlacement(axis)),)
        packing = ((axis, sizes),) if len(sizes) > 1 else ()
        missing = -old.shape[axis] % mesh_size(node, self.mesh_dim) if self.pad else 0
        padding = ((axis, missing),) if missing else ()
        before = node.layout(name)
        layout = dataclasses.replace(
            before,
            placements=(*before.placements, *placements),
            packing=(*before.packing, *packing),
            padding=(*before.padding, *padding),
        )
        if mesh_size(node, self.mesh_dim) == 1:
            edit.set_layout(node, name, layout)
            return
        piece = Layout(before.origin, tuple(old.shape), placements, packing, padding).local(old, node.mesh)
        if name in node.parameters:
            edit.set_parameter(node, name, piece, layout=layout)
        else:
            edit.set_buffer(node, name, piece, layout=layout)

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
        if part is not None and part.attribute is not None:
            edit.set_attribute(node, part.attribute, weight.shape[axis])
        bias, role = own_tensor(node, "bias"), kind.role(axis)
        if role == "vocabulary":
            start = weight.shape[0] * (node.mesh.rank(self.mesh_dim) if node.mesh else 0)
            edit.wrap_forward(node, look_up_own_rows(start, node.layout(name).shape[0]), active=active, inside=True)
        elif kind.sums_over(axis) and bias is not None and kind.without_bias is not None:
            edit.wrap_forward(node, leave_bias_out(kind.without_bias), active=active, inside=True)
        elif (
            role == "output"
            and bias is not None
            and "bias" not in as_tuple(self.names)
            and split_axis(node, "bias", self.mesh_dim) is None
        ):
            edit.note(f"the bias of '{node.path}' is whole still: shard('bias', axis=0) belongs to this")
