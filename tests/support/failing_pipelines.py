"""A model in stages that fails where it is told to, and what a rank then says: for the pipelines of every target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor

import slapo_core as slapo
from slapo_testing import run_ranks

__all__ = ["NO_GRADIENT", "batch", "build", "fail", "failure", "refuse", "train_until_it_fails", "unmade"]

NO_GRADIENT = "BuildError: the loss does not require grad: no trainable parameter contributes to it"


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Fails) -> torch.Tensor:
        ctx.module = module
        if isinstance(x, FakeTensor):
            return x.clone()  # for the recording
        if module.where == "forward" or (module.where == "second step" and module.calls > 3):
            raise ValueError("no more forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.module.where == "backward":
            raise KeyError("no way back")
        return gradient, None


class Fails(nn.Module):
    """A linear layer, until it is told to raise."""

    where = ""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, FakeTensor) and self.where == "preparing":
            raise ValueError("no stages")
        self.calls += not isinstance(x, FakeTensor)
        return Raising.apply(self.inner(x), self)  # type: ignore[no-any-return, no-untyped-call]


class Net(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = ("first", "second", "third", "fourth")[:length]
        for name in names:
            setattr(self, name, Fails())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.children():
            x = block(x)
        return x


def batch(samples: int) -> tuple[torch.Tensor]:
    return (torch.linspace(-1, 1, 4 * samples).reshape(samples, 4),)


def build(
    where: str, guilty: int, cuts: Sequence[str], mesh: Mapping[str, int], *, length: int = 4, **options: Any
) -> tuple[Any, Net]:
    """An engine that fails, and its model.

    Args:
        where: ``"forward"``, ``"second step"``, ``"backward"``, ``"loss"``, ``"optimizer"``, ``"making the optimizer"``
            or ``"preparing"``; on all ranks alike ``"detached"``, ``"frozen"``; ``""``: nowhere.
        guilty: the rank where it fails.
        cuts: after which blocks.
        mesh: its sizes.
        length: how many blocks there are.
        options: of ``build``.
    """
    net = Net(length).requires_grad_(where != "frozen")
    sch = slapo.create_schedule(net, mesh=dict(mesh), example_inputs=(torch.ones(6, 4),))
    for path in cuts:
        sch[path].pipeline_split()

    def loss(output: Any, piece: Any) -> torch.Tensor:
        if where == "loss" and dist.get_rank() == guilty:
            raise ZeroDivisionError("no samples")
        return (output.detach() if where == "detached" else output).square().mean()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if where == "making the optimizer" and dist.get_rank() == guilty:
            raise ArithmeticError("no numbers")
        made = torch.optim.SGD(parameters, lr=0.1)
        if where == "optimizer" and dist.get_rank() == guilty:
            made.register_step_pre_hook(refuse)
        return made

    engine = slapo.build(sch, optimizer=optimizer, loss=loss, **options)
    fail(net, where, guilty)
    return engine, net


def fail(net: Net, where: str, guilty: int) -> None:
    """From now on, on one rank."""
    if dist.get_rank() == guilty:
        for module in net.children():
            module.where = where  # type: ignore[assignment]


def refuse(*_: Any, **__: Any) -> None:
    raise OverflowError("no step")


def train_until_it_fails(engine: Any, given: Any, *, steps: int = 0, blocks: int = 4) -> None:
    """Train so many steps and one more; on a rank where that one raises, the engine is closed, and its state readable.

    A rank that waits for another one which has raised ends with the launch.
    """
    for _ in range(steps):
        engine.train_step(given)
    before = {name: one.clone() for name, one in engine.module.named_parameters()}
    try:
        engine.train_step(given)
    except Exception as error:
        with pytest.raises(
            slapo.BuildError, match=f"the engine is closed, because a step failed: {type(error).__name__}"
        ):
            engine.train_step(given)
        state = engine.state_dict() if dist.get_world_size() == 1 else {}
        assert len(state) in (0, 2 * blocks)
        if NO_GRADIENT in str(error):
            assert all(torch.equal(one, before[name]) for name, one in engine.module.named_parameters())
        raise
    dist.barrier()  # a rank that went well waits for the one that did not
    raise AssertionError("no rank failed")


def failure(on_rank: Callable[..., Any], *args: Any, world_size: int) -> slapo.RankFailedError:
    """What the launcher says of ranks of which one fails."""
    with pytest.raises(slapo.RankFailedError) as failed:
        run_ranks(on_rank, *args, world_size=world_size)
    return failed.value


def unmade(make: Callable[..., tuple[Any, Net]]) -> str:
    """What every rank hears where the optimizer's factory raises on one of them.

    Args:
        make: :func:`build`, of ``where`` and ``guilty``.
    """
    with pytest.raises(slapo.SlapoError) as refused:
        make("making the optimizer", 1)
    return str(refused.value)
