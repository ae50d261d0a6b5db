"""A step of DeepSpeed's pipeline that fails on one rank ends on all of them; each says which one failed, and why."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_core.testing import preload_modules, run_ranks

pytestmark = pytest.mark.ranks
preload_modules(
    "deepspeed.pipe",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "slapo_deepspeed.pipeline.engine",
    "slapo_pipeline.partition.hook",
)

GUILTY = {"forward": 1, "backward": 0, "loss": 2, "optimizer": 1}


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
        self.first, self.second, self.third = Fails(), Fails(), Fails()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))  # type: ignore[no-any-return]


def build(where: str, guilty: int) -> Any:
    net = Net()
    sch = slapo.create_schedule(net, mesh={"pp": 3}, example_inputs=(torch.ones(2, 4),))
    for path in ("first", "second"):
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

    engine = slapo.build(
        sch, target="deepspeed", optimizer=optimizer, loss=loss, config={"gradient_accumulation_steps": 3}
    )
    if dist.get_rank() == guilty:
        for module in net.children():
            module.where = where  # type: ignore[assignment]
    return engine


def refuse(*_: Any) -> None:
    raise OverflowError("no step")


def on_rank() -> dict[str, Any]:
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    batch = (torch.linspace(-1, 1, 24).reshape(6, 4),)
    for where, rank in GUILTY.items():
        engine = build(where, rank)
        with pytest.raises(slapo.RankFailedError) as first:
            engine.train_step(batch)
        with pytest.raises(slapo.BuildError, match="the engine is closed, because ") as after:
            engine.train_step(batch)
        assert len(engine.state_dict()) == 6  # the state can still be read
        told[where] = (str(first.value), type(first.value.__cause__).__name__, first.value.first, str(after.value))
    with pytest.raises(slapo.SlapoError) as unmade:
        build("making the optimiser", 1)
    told["making"] = str(unmade.value)
    engine = build("", 0)
    engine.train_step(batch)  # the first one compares the batches
    with pytest.raises(slapo.BuildError) as uncut:  # on every rank; and nothing is lost
        engine.train_step((torch.ones(6 if dist.get_rank() else 5, 4),))
    told["uncut"] = str(uncut.value)
    told["then"] = float(engine.train_step(batch).loss)
    engine.close()
    return told


def test_every_rank_ends_with_the_error_of_the_guilty_one() -> None:
    ranks = run_ranks(on_rank, world_size=3)
    expected = {
        "forward": ("stage 1 in the forward of micro-batch 0: ValueError: no more forward", "ValueError"),
        "backward": ("stage 0 in the backward of micro-batch 0: KeyError: 'no way back'", "KeyError"),
        "loss": ("stage 2 in the loss of micro-batch 0: ZeroDivisionError: no samples", "ZeroDivisionError"),
        "optimizer": (
            "DeepSpeed's exchange of gradients, or its optimiser's step: OverflowError: no step",
            "OverflowError",
        ),
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
        assert "5 samples do not divide into gradient_accumulation_steps=3" in told["uncut"]
        assert told["then"] == ranks[0]["then"] > 0


def test_what_is_taken_of_deepspeed_is_there() -> None:
    """See pipeline/private.py and pipeline/module.py."""
    from deepspeed.runtime.pipe import engine, module, p2p, topology

    assert list(inspect.signature(p2p.send).parameters) == ["tensor", "dest_stage", "async_op"]
    assert list(inspect.signature(p2p.recv).parameters) == ["tensor", "src_stage", "async_op"]
    assert engine.p2p is p2p
    source = inspect.getsource(engine)
    assert "p2p.send(" in source
    assert "if self.dynamic_shape or self.first_output_send:" in source
    assert "if self.dynamic_shape or self.pipe_recv_buf is None:" in source
    assert "if self.dynamic_shape or self.grad_layer is None:" in source
    assert "self.fwd_outputs.append(self.loss.detach())" in source
    assert "weight_group_list = self.module.get_tied_weights_and_groups()" in source
    made = inspect.getsource(module.PipelineModule.__init__) + inspect.getsource(topology.PipelineParallelGrid.__init__)
    assert made.count("new_group(") == 6  # in private.groups_of: one kind has two ways
