"""A model in stages that fails where it is told to, and what a rank then says: for the pipelines of every target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor

import slapo_core as slapo

__all__ = ["NO_GRADIENT", "Told", "batch", "build", "fail", "refuse", "tell", "tell_of_batches", "without_line"]

NO_GRADIENT = "BuildError: the loss depends on nothing that is trained, so that there is no gradient"


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
        where: ``"forward"``, ``"second step"``, ``"backward"``, ``"loss"``, ``"optimizer"``, ``"making the optimiser"``
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
        if where == "making the optimiser" and dist.get_rank() == guilty:
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


class Told(NamedTuple):
    """What one rank says of a step that failed.

    Args:
        message: of the error.
        cause: the class of what it was raised from.
        first: the rank that it names.
        after: what the next step is refused with.
    """

    message: str
    cause: str
    first: int
    after: str


def without_line(text: str) -> str:
    """The message of an error, without the line of which file it is from."""
    return text.partition(" (")[0]


def tell(engine: Any, given: Any, *, steps: int = 0, blocks: int = 4) -> Told:
    """Train until it fails, after so many steps; a wait for the timeout of groups would outlast the launch."""
    for _ in range(steps):
        engine.train_step(given)
    before = {name: one.clone() for name, one in engine.module.named_parameters()}
    with pytest.raises(slapo.RankFailedError) as failed:
        engine.train_step(given)
    with pytest.raises(slapo.BuildError, match="the engine is closed, because ") as after:
        engine.train_step(given)
    state = engine.state_dict()  # can still be read
    assert len(state) == 2 * blocks
    if NO_GRADIENT in str(failed.value):
        assert all(torch.equal(state[name], one) for name, one in before.items())
    cause = type(failed.value.__cause__).__name__
    return Told(str(failed.value), cause, failed.value.first, str(after.value))


def tell_of_batches(make: Callable[..., tuple[Any, Net]], samples: int) -> dict[str, Any]:
    """What is refused before ranks wait for each other, with nothing lost: an optimiser on one rank, and a batch.

    Args:
        make: :func:`build`, of ``where`` and ``guilty``.
        samples: of a batch that can be cut.
    """
    told: dict[str, Any] = {}
    with pytest.raises(slapo.SlapoError) as unmade:
        make("making the optimiser", 1)
    told["making"] = str(unmade.value)
    engine, _ = make("", 0)
    engine.train_step(batch(samples))  # the first one compares the batches
    with pytest.raises(slapo.BuildError) as uncut:
        engine.train_step((torch.ones(samples if dist.get_rank() else samples - 1, 4),))
    told["uncut"] = str(uncut.value)
    told["then"] = float(engine.train_step(batch(samples)).loss)
    engine.close()
    return told
