"""A step that fails on one rank ends on all of them, and each says which one failed, where, and why."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_core.testing import run_ranks

PLACES = ("forward", "backward", "loss", "optimizer", "second step")


class Fails(nn.Module):
    """The identity, until it is told to raise."""

    where = ""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor and self.where == "preparing":
            raise ValueError("no stages")
        self.calls += type(x) is torch.Tensor
        return Raising.apply(self.inner(x), self)  # type: ignore[no-any-return, no-untyped-call]


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Fails) -> torch.Tensor:
        ctx.module = module
        if type(x) is not torch.Tensor:
            return x.clone()  # for the recording
        if module.where == "forward" or (module.where == "second step" and module.calls > 3):
            raise ValueError("no more forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.module.where == "backward":
            raise KeyError("no way back")
        return gradient, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third, self.fourth = Fails(), Fails(), Fails(), Fails()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fourth(self.third(self.second(self.first(x))))  # type: ignore[no-any-return]


def build(mesh: dict[str, int], schedule: str, where: str, guilty: int) -> Any:
    net = Net()
    sch = slapo.create_schedule(net, mesh=mesh, example_inputs=(torch.ones(6, 4),))
    for path in ("first", "second", "third")[: 2 + ("tp" in mesh or "dp" in mesh)]:
        sch[path].pipeline_split()

    def loss(output: Any, piece: Any) -> torch.Tensor:
        if where == "loss" and dist.get_rank() == guilty:
            raise ZeroDivisionError("no samples")
        return output.square().mean()

    engine = slapo.build(
        sch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=loss, pipeline_schedule=schedule, microbatches=3
    )
    if dist.get_rank() == guilty:
        for module in net.children():
            module.where = where
        if where == "optimizer":
            engine.optimizer.register_step_pre_hook(_refuse)
    return engine, net


def _refuse(*_: Any) -> None:
    raise OverflowError("no step")


def on_rank(mesh: dict[str, int], guilty: dict[str, int]) -> dict[str, tuple[Any, ...]]:
    torch.set_num_threads(1)
    told = {}
    for where, rank in guilty.items():
        engine, _ = build(mesh, "1f1b", where, rank)
        batch = (torch.linspace(-1, 1, 24).reshape(6, 4),)
        start, steps = time.monotonic(), 0
        try:
            for _ in range(2):
                engine.train_step(batch)
                steps += 1
        except slapo.RankFailedError as error:
            first, cause = error, type(error.__cause__).__name__
        else:
            raise AssertionError(f"{where}: nothing failed")
        took = time.monotonic() - start
        with pytest.raises(slapo.BuildError) as after:
            engine.train_step(batch)
        assert len(engine.state_dict()) == 8  # the state can still be read
        told[where] = (str(first), cause, first.first, steps, took, str(after.value))
    return told


def test_every_rank_ends_with_the_error_of_the_guilty_one() -> None:
    guilty = {"forward": 1, "backward": 0, "loss": 2, "optimizer": 1, "second step": 0}
    ranks = run_ranks(on_rank, {"pp": 3}, guilty, world_size=3)
    expected = {
        "forward": ("stage 1 in the forward of micro-batch 0: ValueError: no more forward", "ValueError"),
        "backward": ("stage 0 in the backward of micro-batch 0: KeyError: 'no way back'", "KeyError"),
        "loss": ("stage 2 in the loss of micro-batch 0: ZeroDivisionError: no samples", "ZeroDivisionError"),
        "optimizer": ("the step of the optimiser: OverflowError: no step", "OverflowError"),
        "second step": ("stage 0 in the forward of micro-batch 0: ValueError: no more forward", "ValueError"),
    }
    for rank, told in enumerate(ranks):
        assert list(told) == list(PLACES)
        for where, (message, cause, first, steps, took, after) in told.items():
            text, kind = expected[where]
            assert message.startswith(f"a step failed on rank {guilty[where]}, {text} ("), where
            assert first == guilty[where]
            assert cause == kind or rank != guilty[where]
            assert steps == (where == "second step")
            assert took < 60  # far from the timeout of the groups, which is minutes
            assert after.startswith(f"the engine is closed, because a step failed on rank {guilty[where]}, ")


def on_four() -> list[tuple[str, ...]]:
    torch.set_num_threads(1)
    told = []
    for mesh in ({"dp": 2, "pp": 2}, {"pp": 2, "tp": 2}):
        engine, net = build(mesh, "interleaved_1f1b", "preparing", 3)
        batch = (torch.linspace(-1, 1, 24).reshape(6, 4),)
        with pytest.raises(slapo.SlapoError) as unprepared:
            engine.train_step(batch)
        if dist.get_rank() == 3:
            for module in net.children():
                module.where = ""
        engine.train_step(batch)  # it is open, and in step
        if dist.get_rank() == 3:
            for module in net.children():
                module.where = "forward"
        with pytest.raises(slapo.RankFailedError) as failed:
            engine.train_step(batch)
        told.append((type(unprepared.value).__name__, str(unprepared.value), str(failed.value)))
    return told


def test_replicas_and_tensor_parallel_ranks_hear_of_it_too() -> None:
    for rank, both in enumerate(run_ranks(on_four, world_size=4)):
        for kind, unprepared, failed in both:
            assert "ValueError: no stages" in unprepared
            assert (kind == "BuildError") == (rank != 3)  # where it failed it is what it was
            assert unprepared.startswith("preparing the step failed on rank 3: ") or rank == 3
            assert failed.startswith(
                "a step failed on rank 3, stage 1 in the forward of micro-batch 0: ValueError: no more forward ("
            )


def leaves(directory: str) -> str:
    """Rank 1 ends as a process, without a word."""
    engine, _ = build({"pp": 3}, "1f1b", "", -1)
    batch = (torch.linspace(-1, 1, 24).reshape(6, 4),)
    engine.train_step(batch)
    if dist.get_rank() == 1:
        os._exit(3)
    try:
        engine.train_step(batch)
    except slapo.RankFailedError as error:
        Path(directory, str(dist.get_rank())).write_text(str(error))
    return ""


def test_a_rank_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(slapo.RankFailedError, match="rank 1"):
        run_ranks(leaves, str(tmp_path), world_size=3)
    told = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert told
    assert all("rank 1, no sign of life: the process ended, or hangs" in text for text in told)
