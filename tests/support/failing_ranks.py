"""A tensor-parallel model of which a rank fails, and what every rank gets to know; for the tests of verify."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.placement_types import Shard as OnAxis

import slapo_core as slapo
from slapo_core import Node
from slapo_core.internals import Edit
from slapo_core.layout import Layout, Mesh

INPUTS = torch.linspace(-1, 1, 24).reshape(3, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8, bias=False), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(torch.tanh(self.up(x))))


class UnsentError(Exception):
    """One that pickle refuses, and whose text needs what it was made with."""

    def __init__(self, number: int) -> None:
        super().__init__(lambda: number)

    def __str__(self) -> str:
        return f"number {self.args[0]()}"


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh, forward: bool) -> torch.Tensor:
        ctx.mesh, ctx.in_forward = mesh, forward
        return _summed(x, mesh) if forward else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad if ctx.in_forward else _summed(grad, ctx.mesh), None, None


def _summed(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x, group=mesh.group("tp"))
    return x


@dataclass(frozen=True)
class Split(slapo.Primitive):
    """Keep this rank's piece of parameters."""

    name = "failing.split"
    equivalence = slapo.Equivalence.REORDERED
    names: tuple[str, ...]
    axis: int

    def apply(self, node: Node, edit: Edit) -> None:
        for name in self.names:
            full = node.parameters[name]
            layout = Layout(node.layout(name).origin, tuple(full.shape), (("tp", OnAxis(self.axis)),))
            edit.set_parameter(node, name, layout.local(full, node.mesh), layout=layout)


@dataclass(frozen=True)
class Reduce(slapo.Primitive):
    """Sum the output over tp in forward, or the input's gradient in backward."""

    name = "failing.reduce"
    equivalence = slapo.Equivalence.REORDERED
    direction: str

    def apply(self, node: Node, edit: Edit) -> None:
        mesh = node.mesh
        if self.direction == "forward":
            edit.add_hook(node, "forward", lambda m, args, kwargs, output: _Sum.apply(output, mesh, True))
        else:
            edit.add_hook(node, "forward_pre", lambda m, args, kwargs: ((_Sum.apply(args[0], mesh, False),), kwargs))


def _raise_value_error() -> None:
    raise ValueError(f"out of paint on rank {dist.get_rank()}")


WAYS: dict[str, Callable[[], None]] = {
    "raise": _raise_value_error,
    "unsendable": lambda: (_ for _ in ()).throw(UnsentError(dist.get_rank())),
    "exit": lambda: sys.exit(3),
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


@dataclass(frozen=True)
class Fail(slapo.Primitive):
    """Fail on some ranks, in one phase of a run.

    Args:
        ranks: global ones.
        phase: "forward", "backward", "evaluation", or "updates": in the second forward of one model that trains.
        way: of `WAYS`.
    """

    name = "failing.fail"
    equivalence = slapo.Equivalence.EXACT
    ranks: tuple[int, ...]
    phase: str
    way: str = "raise"

    def apply(self, node: Node, edit: Edit) -> None:
        edit.add_hook(node, "forward_pre", _Failing(self))


class _Failing:
    def __init__(self, fail: Fail) -> None:
        self.fail, self.trained = fail, 0

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        fail = self.fail
        if not dist.is_initialized() or dist.get_rank() not in fail.ranks:
            return None
        self.trained += module.training
        now = {
            "forward": True,
            "evaluation": not module.training,
            "updates": module.training and self.trained > 1,
        }
        if fail.phase == "backward" and args[0].requires_grad:
            return (_FailBackward.apply(args[0], fail.way), *args[1:]), kwargs
        if now.get(fail.phase):
            WAYS[fail.way]()
        return None


class _FailBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: str) -> torch.Tensor:
        ctx.way = way
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        WAYS[ctx.way]()
        return grad, None


@dataclass(frozen=True)
class LeaveOut(slapo.Primitive):
    """In evaluation, take part in one sum more, but for some ranks."""

    name = "failing.leave_out"
    equivalence = slapo.Equivalence.EXACT
    ranks: tuple[int, ...]

    def apply(self, node: Node, edit: Edit) -> None:
        mesh, ranks = node.mesh, self.ranks

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not module.training and dist.get_rank() not in ranks:
                dist.all_reduce(torch.zeros(1), group=mesh.group("tp"))

        edit.add_hook(node, "forward_pre", hook)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def scheduled(mesh: Any, *steps: tuple[str, slapo.Primitive], model: nn.Module | None = None) -> slapo.Schedule:
    """The model, split as is right, and then ``steps``: path and primitive."""
    sch = slapo.create_schedule(model or net(), mesh=mesh)
    sch["up"].apply(Split(("weight", "bias"), axis=0))
    sch["up"].apply(Reduce("backward"))
    sch["down"].apply(Split(("weight",), axis=1))
    sch["down"].apply(Reduce("forward"))
    for path, primitive in steps:
        sch[path].apply(primitive)
    return sch


def outcome(sch: Any, inputs: Any = INPUTS, **options: Any) -> Any:
    """The report, or the error with its fields; both travel."""
    try:
        return slapo.verify(sch, inputs, **options)
    except slapo.SlapoError as error:
        error.__cause__ = None
        return error
