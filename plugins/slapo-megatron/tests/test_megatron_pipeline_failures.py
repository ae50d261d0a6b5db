"""A step of Megatron's pipeline that fails on one rank ends on all of them; each says which one failed, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_core.testing import preload_modules, run_ranks

pytestmark = pytest.mark.ranks
preload_modules("slapo_megatron.pipeline.running", "slapo_pipeline.partition.hook")

GUILTY = {"forward": 1, "backward": 0, "loss": 1, "reducing": 0, "optimizer": 1}
TWICE = ("first", "second", "third")


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Fails) -> torch.Tensor:
        ctx.module = module
        if type(x) is torch.Tensor and module.where == "forward":  # not while it is recorded
            raise ValueError("no more forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.module.where == "backward":
            raise KeyError("no way back")
        return gradient, None


class Fails(nn.Module):
    where = ""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Raising.apply(self.inner(x), self)  # type: ignore[no-any-return, no-untyped-call]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third, self.fourth = (Fails() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fourth(self.third(self.second(self.first(x))))  # type: ignore[no-any-return]


def build(where: str, guilty: int, cuts: tuple[str, ...] = ("second",), mesh: Any = None, **options: Any) -> Any:
    net = Net()
    sch = slapo.create_schedule(net, mesh=mesh or {"pp": 2}, example_inputs=(torch.ones(2, 4),))
    for path in cuts:
        sch[path].pipeline_split()

    def loss(output: Any, piece: Any) -> torch.Tensor:
        if where == "loss" and dist.get_rank() == guilty:
            raise ZeroDivisionError("no samples")
        return output.square().mean()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if where == "making the optimiser" and dist.get_rank() == guilty:
            raise ArithmeticError("no numbers")
        made = torch.optim.SGD(parameters, lr=0.1)
        if where == "optimizer" and dist.get_rank() == guilty:
            made.register_step_pre_hook(refuse)
        return made

    engine = slapo.build(sch, target="megatron", optimizer=optimizer, loss=loss, microbatches=4, **options)
    if dist.get_rank() == guilty:
        for module in net.children():
            module.where = where  # type: ignore[assignment]
        if where == "reducing":  # the other ranks wait for it in a group of Megatron's
            engine.megatron.chunks[0].finish_grad_sync = refuse
    return engine


def refuse(*_: Any, **__: Any) -> None:
    raise OverflowError("no step")


def on_rank(cuts: tuple[str, ...], mesh: dict[str, int]) -> dict[str, Any]:
    from tests.cpu_megatron import install

    install()
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    batch = (torch.linspace(-1, 1, 32).reshape(8, 4),)
    for where, rank in GUILTY.items():
        engine = build(where, rank, cuts, mesh, max_grad_norm=1.0)
        with pytest.raises(slapo.RankFailedError) as first:
            engine.train_step(batch)
        with pytest.raises(slapo.BuildError, match="the engine is closed, because ") as after:
            engine.train_step(batch)
        assert len(engine.state_dict()) == 8  # the state can still be read
        cause = type(first.value.__cause__).__name__
        told[where] = (str(first.value), cause, first.value.first, str(after.value))
    with pytest.raises(slapo.SlapoError) as unmade:
        build("making the optimiser", 1, cuts, mesh)
    told["making"] = str(unmade.value)
    engine = build("", 0, cuts, mesh)
    engine.train_step(batch)  # the first one compares the batches
    with pytest.raises(slapo.BuildError) as uncut:  # on every rank; and nothing is lost
        engine.train_step((torch.ones(8 if dist.get_rank() else 7, 4),))
    told["uncut"] = str(uncut.value)
    told["then"] = float(engine.train_step(batch).loss)
    engine.close()
    return told


@pytest.mark.parametrize("cuts", [("second",), TWICE])
def test_every_rank_ends_with_the_error_of_the_guilty_one(cuts: tuple[str, ...]) -> None:
    ranks = run_ranks(on_rank, cuts, {"pp": 2}, world_size=2)
    last = len(cuts)
    expected = {
        "forward": ("stage 1 in the forward of micro-batch 0: ValueError: no more forward", "ValueError"),
        "backward": (f"stage {last - 1} in the backward of micro-batch 0: KeyError: 'no way back'", "KeyError"),
        "loss": (f"stage {last} in the loss of micro-batch 0: ZeroDivisionError: no samples", "ZeroDivisionError"),
        "reducing": ("Megatron's exchange of gradients, or its optimizer's step: Over", "OverflowError"),
        "optimizer": ("Megatron's exchange of gradients, or its optimizer's step: Over", "OverflowError"),
    }
    for where, guilty in GUILTY.items():
        text, cause = expected[where]
        for rank, told in enumerate(ranks):
            message, own_cause, first, after = told[where]
            assert f"a step failed on rank {guilty}, {text}" in message, (where, rank, message)
            assert (own_cause == cause) is (rank == guilty)
            assert first == guilty
            assert text in after
    for told in ranks:
        assert "no numbers" in told["making"]
        assert "7 samples do not divide into microbatches=4" in told["uncut"]
        assert told["then"] == ranks[0]["then"] > 0
