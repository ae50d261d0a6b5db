"""Communicate between tensor-parallel ranks: collectives with their gradients.

Three pairs; in each, one function is the gradient of the other, so that gradients of gradients are right too:

=================  =============================  =================================
function           forward                        backward
=================  =============================  =================================
`all_reduce`       sum over the ranks             identity
`copy`             identity                       sum over the ranks
`all_gather`       concatenate the ranks' shards  this rank's shard of the gradient
`split`            this rank's shard              concatenate the ranks' gradients
`gather_sum`       concatenate the ranks' shards  sum, then this rank's shard
`reduce_scatter`   sum, then this rank's shard    concatenate the ranks' gradients
=================  =============================  =================================

They are functional (no argument is overwritten unless the caller says so), give plain tensors, and ``torch.compile``
traces them. In a static graph each is one call; on an abstract mesh they give tensors without values their
shapes, so that a schedule can be traced there. Source: the conjugate operators f and g of Megatron-LM (paper section
2.2); ``megatron/core/tensor_parallel/mappings.py`` has the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function_unary

from slapo_core import Mesh, MeshError
from slapo_core.observers import Origin, run_from
from slapo_tp.private import FUNCTIONAL, detect_fake_mode, is_gloo

_ops = FUNCTIONAL  # each by its overload: resolving one costs microseconds a call


Parts = tuple[int, tuple[int, ...], tuple[bool, ...]]


@dataclass(frozen=True)
class RankGroup:
    """Describe the ranks along a mesh dimension as plain data.

    Args:
        name: torch's name of the process group; None where the mesh is only declared.
        size: number of ranks, e.g. 2.
        rank: this process's place, from 0.
        launch: what gives the mesh its processes, for a hint.
        holders: number of consecutive ranks that hold the same shard, among which `copy` sums; None: all of them.
        parts: ``(axis, lengths, which of them `copy` sums)`` where the ranks hold only parts of the shard together;
            None: all of it.
    """

    name: str | None
    size: int
    rank: int
    launch: str
    holders: int | None = None
    parts: Parts | None = None

    @classmethod
    def along(cls, mesh: Mesh, mesh_dim: str) -> RankGroup:
        """Return the group along ``mesh_dim``."""
        group = None if mesh.is_abstract else mesh.group(mesh_dim)
        name = None if group is None else group.group_name
        return cls(name, mesh.size(mesh_dim), mesh.rank(mesh_dim), mesh.launch_hint())

    def running(self) -> str:
        """Return the group's name, for a collective that is about to run.

        Raises:
            MeshError: the mesh is abstract, so there is no process group.
        """
        if self.name is None:
            raise MeshError(
                f"sync ran on an abstract mesh: this process has no process group for the {self.size} ranks",
                hint=self.launch,
            )
        return self.name


def all_reduce(tensor: Tensor, group: RankGroup, *, overwrite: bool = False) -> Tensor:
    """Sum over the ranks; the gradient passes through.

    Args:
        tensor: this rank's partial.
        group: the ranks.
        overwrite: ``tensor`` has no other reference, so that the sum may take its memory, which saves a copy.
            Ignored by ``torch.compile``, which decides it.
    """
    return _call("all_reduce_" if overwrite and not is_compiling() else "all_reduce", tensor, group)


def copy(tensor: Tensor, group: RankGroup) -> Tensor:
    """Return the tensor; its gradient is summed over the ranks or holders."""
    return _call("copy", tensor, group)


def all_gather(tensor: Tensor, axis: int, group: RankGroup, length: int | None = None) -> Tensor:
    """Concatenate the ranks' shards along ``axis``; take this rank's shard of the gradient.

    Args:
        tensor: this rank's shard.
        axis: to concatenate along.
        group: the ranks.
        length: elements of ``axis`` without the last shards' padding, which is cut off and whose gradient is zero;
            None: no padding.
    """
    return _call("all_gather", tensor, group, axis, length)


def split(tensor: Tensor, axis: int, group: RankGroup) -> Tensor:
    """Take this rank's shard of ``axis``; gather the gradient."""
    extent = tensor.shape[axis]
    return _call("split", tensor, group, axis, extent if extent % group.size else None)


def gather_sum(tensor: Tensor, axis: int, group: RankGroup) -> Tensor:
    """Concatenate the ranks' shards along ``axis``; sum the gradient and take this rank's shard."""
    return _call("gather_sum", tensor, group, axis)


def reduce_scatter(tensor: Tensor, axis: int, group: RankGroup) -> Tensor:
    """Sum over the ranks, take this rank's shard of ``axis``; gather the gradient."""
    return _call("reduce_scatter", tensor, group, axis)


def start_sum(tensor: Tensor, axis: int | None, group: RankGroup) -> Tensor:
    """Start to sum over the ranks, without waiting; `wait` gives the sum.

    A gradient of it, where one is recorded, needs the sum at once.

    Args:
        tensor: this rank's partial, without another reference: the sum may take its memory.
        axis: of which this rank's shard of the sum is taken; None for all of it.
        group: the ranks.
    """
    name = group.running()
    if is_grad_enabled():
        called = "all_reduce" if axis is None else "reduce_scatter"
        return _Collective.apply(tensor, (called, group, axis or 0, None))
    if axis is not None:
        return _start_sum_shard(tensor, axis, name, group.size)
    if is_compiling() or not tensor.is_contiguous():
        return _ops.all_reduce.default(tensor, "sum", name)
    return _ops.all_reduce_.default(tensor, "sum", name)


def wait(tensor: Tensor) -> Tensor:
    """Wait for the sum that `start_sum` started."""
    return tensor if is_grad_enabled() else _ops.wait_tensor.default(tensor)


def _call(name: str, tensor: Tensor, group: RankGroup, axis: int = 0, length: int | None = None) -> Tensor:
    if has_torch_function_unary(tensor):  # a mode, which writes it down as one call
        called = CollectiveTarget(name, group, axis, length)
        return handle_torch_function(called, (tensor,), tensor)  # type: ignore[no-any-return]
    if group.name is None:
        # While a graph is recorded, a parameter has values and its results have none.
        if tensor.is_meta or detect_fake_mode(tensor) is not None:
            return _TABLE[name].shapes(tensor, group.size, axis, length)
        group.running()
    if name == "all_reduce_":
        if tensor.is_contiguous() and not is_compiling():
            return _InPlace.apply(tensor, (name, group, axis, length))
        name = "all_reduce"
    return _Collective.apply(tensor, (name, group, axis, length))


@dataclass(frozen=True)
class CollectiveTarget:
    """Call a collective from a graph: plain data, and a function of one tensor.

    Args:
        name: of one of the functions above; ``"all_reduce_"`` overwrites its tensor.
        group: the ranks.
        axis: to gather or scatter.
        length: of that axis without padding, for `all_gather`.
        origin: the hook that communicates.
    """

    name: str
    group: RankGroup
    axis: int = 0
    length: int | None = None
    origin: Origin | None = None
    slapo_is_observed = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", self.name)
        object.__setattr__(self, "__qualname__", self.name)

    def __call__(self, tensor: Tensor) -> Tensor:
        if is_compiling():
            return _call(self.name, tensor, self.group, self.axis, self.length)
        return run_from(self.origin, _call, self.name, tensor, self.group, self.axis, self.length)  # type: ignore[no-any-return]

    def slapo_from(self, origin: Origin) -> CollectiveTarget:
        """Return the same call as one of a hook."""
        return replace(self, origin=origin)


class _Collective(Function):
    """Run a collective of the table, and in backward its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, call: tuple[str, RankGroup, int, int | None]) -> Tensor:
        ctx.call = call
        name, group, axis, length = call
        return _TABLE[name].run(tensor, group, axis, length)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        name, group, axis, length = ctx.call
        name = _TABLE[name].gradient
        if is_grad_enabled():
            gradient = _Collective.apply(gradient, (name, group, axis, length))
        elif name != "copy":
            gradient = _TABLE[name].run(gradient, group, axis, length)
        return gradient, None


class _InPlace(_Collective):
    """Run a collective that overwrites its tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, call: tuple[str, RankGroup, int, int | None]) -> Tensor:
        ctx.mark_dirty(tensor)
        return _Collective.forward(ctx, tensor, call)


# torch's collectives concatenate and scatter along axis 0 only.


def _identity(tensor: Tensor, group: RankGroup, axis: int, length: int | None) -> Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: Tensor, group: RankGroup, axis: int, length: int | None) -> Tensor:
    if group.holders is not None:
        return _sum_of_holders(tensor, group) if group.parts is None else _sum_of_parts(tensor, group)
    return _ops.wait_tensor.default(_ops.all_reduce.default(tensor, "sum", group.name))


def _sum_in_place(tensor: Tensor, group: RankGroup, axis: int, length: int | None) -> Tensor:
    _ops.wait_tensor.default(_ops.all_reduce_.default(tensor, "sum", group.name))
    return tensor  # what wait_tensor gives, but for tensors without values


def _sum_of_holders(tensor: Tensor, group: RankGroup) -> Tensor:
    """Sum among the ranks with the same shard, in the order of the ranks."""
    assert group.name is not None
    assert group.holders is not None
    if tensor.is_cuda and is_gloo(group.name):
        return _sum_of_holders(tensor.cpu(), group).to(tensor.device)
    first, length = group.rank - group.rank % group.holders, tensor.numel()
    lengths = [length if first <= other < first + group.holders else 0 for other in range(group.size)]
    sent = tensor.reshape(-1).repeat(group.holders)
    received = _ops.wait_tensor.default(_ops.all_to_all_single.default(sent, lengths, lengths, group.name))
    return received.view(group.holders, *tensor.shape).sum(0)


def _sum_of_parts(tensor: Tensor, group: RankGroup) -> Tensor:
    """Sum the shared parts of a shard among the ranks that hold them."""
    assert group.parts is not None
    axis, lengths, are_shared = group.parts
    found = list(tensor.split(lengths, dim=axis))
    shared = [number for number, is_shared in enumerate(are_shared) if is_shared]
    total = _sum_of_holders(torch.cat([found[number] for number in shared], dim=axis), group)
    for number, part in zip(shared, total.split([lengths[number] for number in shared], dim=axis), strict=True):
        found[number] = part
    return torch.cat(found, dim=axis)


def _concatenate(tensor: Tensor, group: RankGroup, axis: int, length: int | None) -> Tensor:
    assert group.name is not None
    if tensor.is_cuda and is_gloo(group.name):  # ranks that share a GPU; gloo would take its addresses for the host's
        return _concatenate(tensor.cpu(), group, axis, length).to(tensor.device)
    gathered = _ops.all_gather_into_tensor.default(tensor.contiguous(), group.size, group.name)
    shards = _ops.wait_tensor.default(gathered)
    if axis % tensor.dim() == 0 and length is None:
        return shards
    return torch.cat(_cut(shards.chunk(group.size), axis, length), dim=axis)


def _cut(shards: Sequence[Tensor], axis: int, length: int | None) -> list[Tensor]:
    """Cut the shards to ``length`` elements of ``axis`` in all."""
    if length is None:
        return list(shards)
    extent = shards[0].shape[axis]
    rest = [max(0, min(extent, length - number * extent)) for number in range(len(shards))]
    return [shard.narrow(axis, 0, own) for shard, own in zip(shards, rest, strict=True)]


def _own_shard(tensor: Tensor, group: RankGroup, axis: int, length: int | None) -> Tensor:
    """Return this rank's shard, padded with zeros if ``length`` is not divisible."""
    extent = tensor.shape[axis]
    share = -(-extent // group.size)
    start = min(group.rank * share, extent)
    missing = max(0, start + share - extent)
    own = tensor.narrow(axis, start, share - missing)
    if not missing:
        return own.clone(memory_format=torch.contiguous_format)
    return torch.cat([own, torch.zeros_like(tensor.narrow(axis, 0, missing))], dim=axis)


def _sum_shard(tensor: Tensor, group: RankGroup, axis: int, length: int | None) -> Tensor:
    return _ops.wait_tensor.default(_start_sum_shard(tensor, axis, group.running(), group.size))


def _start_sum_shard(tensor: Tensor, axis: int, name: str, size: int) -> Tensor:
    stacked = tensor.contiguous() if axis % tensor.dim() == 0 else torch.cat(tensor.chunk(size, dim=axis))
    return _ops.reduce_scatter_tensor.default(stacked, "sum", size, name)


def _gathered_shapes(tensor: Tensor, size: int, axis: int, length: int | None) -> Tensor:
    return torch.cat(_cut([tensor] * size, axis, length), dim=axis)


def _shard_shapes(tensor: Tensor, size: int, axis: int, length: int | None) -> Tensor:
    return tensor.narrow(axis, 0, tensor.shape[axis] // size).clone(memory_format=torch.contiguous_format)


class _Row(NamedTuple):
    """Describe a row of the table of collectives.

    Args:
        run: the forward, of a tensor, the ranks, an axis, and its length without padding.
        gradient: the name of the backward.
        shapes: the forward on an abstract mesh, of tensors without values.
    """

    run: Callable[[Tensor, RankGroup, int, int | None], Tensor]
    gradient: str
    shapes: Callable[[Tensor, int, int, int | None], Tensor]


_TABLE = {
    "all_reduce": _Row(_sum, "copy", lambda tensor, *_: tensor.clone()),
    "all_reduce_": _Row(_sum_in_place, "copy", lambda tensor, *_: tensor.add_(0)),
    "copy": _Row(_identity, "all_reduce", lambda tensor, *_: tensor.view_as(tensor)),
    "all_gather": _Row(_concatenate, "split", _gathered_shapes),
    "split": _Row(_own_shard, "all_gather", _shard_shapes),
    "gather_sum": _Row(_concatenate, "reduce_scatter", _gathered_shapes),
    "reduce_scatter": _Row(_sum_shard, "gather_sum", _shard_shapes),
}
