"""The collectives of tensor parallelism, each with its gradient.

Three pairs; in each, one function is the gradient of the other, so that gradients of gradients are right too:

=================  =============================  =================================
function           forward                        backward
=================  =============================  =================================
`all_reduce`       sum over the ranks             identity
`copy`             identity                       sum over the ranks
`all_gather`       concatenate the ranks' pieces  this rank's piece of the gradient
`split`            this rank's piece              concatenate the ranks' gradients
`gather_sum`       concatenate the ranks' pieces  sum, then this rank's piece
`reduce_scatter`   sum, then this rank's piece    concatenate the ranks' gradients
=================  =============================  =================================

They are functional (no argument is overwritten), give plain tensors, and ``torch.compile`` traces them. Source: the
conjugate operators f and g of Megatron-LM (paper section 2.2); ``megatron/core/tensor_parallel/mappings.py`` has the
same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from slapo_core import Mesh, MeshError

__all__ = ["Group", "all_gather", "all_reduce", "copy", "gather_sum", "reduce_scatter", "split"]

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """The ranks along one mesh dimension, as plain data: it can be copied, compared and compiled.

    Args:
        name: torch's name of the process group; None where the mesh is only declared.
        size: number of ranks, e.g. 2.
        rank: this process's place, from 0.
        launch: the command that starts the processes of the mesh.
    """

    name: str | None
    size: int
    rank: int
    launch: str

    @classmethod
    def along(cls, mesh: Mesh, mesh_dim: str) -> Group:
        """The group along ``mesh_dim``, which has more than one rank."""
        group = None if mesh.is_dry else mesh.group(mesh_dim)
        name = None if group is None else group.group_name
        return cls(name, mesh.size(mesh_dim), mesh.rank(mesh_dim), mesh.launch_command())

    def running(self) -> str:
        """The name, for a collective that is about to run.

        Raises:
            MeshError: the mesh is only declared, so nobody would answer.
        """
        if self.name is None:
            raise MeshError(
                f"a sync over {self.size} ranks was reached in a process that only plays one of them", hint=self.launch
            )
        return self.name


def all_reduce(tensor: Tensor, group: Group) -> Tensor:
    """Sum over the ranks; the gradient passes through."""
    return _AllReduce.apply(tensor, group.running())


def copy(tensor: Tensor, group: Group) -> Tensor:
    """The tensor itself; its gradient is summed over the ranks."""
    return _Copy.apply(tensor, group.running())


def all_gather(tensor: Tensor, axis: int, group: Group) -> Tensor:
    """The ranks' pieces one after the other along ``axis``; the gradient is this rank's piece."""
    return _AllGather.apply(tensor, axis, group.running(), group.size, group.rank)


def split(tensor: Tensor, axis: int, group: Group) -> Tensor:
    """This rank's piece of ``axis``; the gradient is gathered."""
    return _Split.apply(tensor, axis, group.running(), group.size, group.rank)


def gather_sum(tensor: Tensor, axis: int, group: Group) -> Tensor:
    """The ranks' pieces one after the other along ``axis``; the gradient is summed, then this rank's piece taken."""
    return _GatherSum.apply(tensor, axis, group.running(), group.size)


def reduce_scatter(tensor: Tensor, axis: int, group: Group) -> Tensor:
    """Sum over the ranks, this rank's piece of ``axis``; the gradient is gathered."""
    return _ReduceScatter.apply(tensor, axis, group.running(), group.size)


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str) -> Tensor:
        ctx.name = name
        return _sum(tensor, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Copy.apply(gradient, ctx.name), None


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str) -> Tensor:
        ctx.name = name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _AllReduce.apply(gradient, ctx.name), None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: int, name: str, size: int, rank: int) -> Tensor:
        ctx.arguments = (axis, name, size, rank)
        return _concatenate(tensor, axis, name, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Split.apply(gradient, *ctx.arguments), None, None, None, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: int, name: str, size: int, rank: int) -> Tensor:
        ctx.arguments = (axis, name, size, rank)
        length = tensor.shape[axis] // size
        return tensor.narrow(axis, rank * length, length).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _AllGather.apply(gradient, *ctx.arguments), None, None, None, None


class _GatherSum(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: int, name: str, size: int) -> Tensor:
        ctx.arguments = (axis, name, size)
        return _concatenate(tensor, axis, name, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _ReduceScatter.apply(gradient, *ctx.arguments), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: int, name: str, size: int) -> Tensor:
        ctx.arguments = (axis, name, size)
        return _sum_piece(tensor, axis, name, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _GatherSum.apply(gradient, *ctx.arguments), None, None, None


# torch's collectives concatenate and scatter along axis 0 only.


def _sum(tensor: Tensor, name: str) -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(tensor, "sum", name))


def _concatenate(tensor: Tensor, axis: int, name: str, size: int) -> Tensor:
    pieces = _ops.wait_tensor(_ops.all_gather_into_tensor(tensor.contiguous(), size, name))
    return pieces if axis % tensor.dim() == 0 else torch.cat(pieces.chunk(size), dim=axis)


def _sum_piece(tensor: Tensor, axis: int, name: str, size: int) -> Tensor:
    stacked = tensor.contiguous() if axis % tensor.dim() == 0 else torch.cat(tensor.chunk(size, dim=axis))
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(stacked, "sum", size, name))
