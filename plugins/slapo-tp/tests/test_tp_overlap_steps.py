"""``sync(..., overlap=True)`` beside other steps, and beside the exchange between replicas."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_testing import run_ranks

from .checks import rand
from .overlap_model import Mlp, assert_same, gradients, outcome, split

pytestmark = pytest.mark.ranks


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def checkpointed(sch: slapo.Schedule, *, overlap: bool) -> None:
    traced_after(sch, overlap=overlap, trace=False)
    sch["blocks.0"].checkpoint()
    sch["blocks.1.up"].checkpoint()


def traced_before(sch: slapo.Schedule, *, overlap: bool, flatten: bool) -> None:
    sch["blocks.*"].trace(flatten=flatten)
    traced_after(sch, overlap=overlap, trace=False)


def traced_after(sch: slapo.Schedule, *, overlap: bool, flatten: bool = True, trace: bool = True) -> None:
    for block in sch["blocks.*"]:
        split(block, overlap=overlap)
    if trace:
        sch["blocks.*"].trace(flatten=flatten)


def fused(sch: slapo.Schedule, *, overlap: bool) -> None:
    """A step that computes what is behind the layer in another way."""
    traced_after(sch, overlap=overlap)
    sch["blocks.*"].checkpoint(match=lambda x: F.gelu(x))


def undone(sch: slapo.Schedule, *, overlap: bool) -> None:
    traced_after(sch, overlap=overlap, trace=False)
    while sch.records:
        sch.undo()
    assert sch.model.blocks[0].up.__dict__.keys() == nn.Linear(6, 8).__dict__.keys()
    traced_after(sch, overlap=overlap, trace=False)


STEPS: dict[str, Any] = {
    "checkpointed": checkpointed,
    "traced before": functools.partial(traced_before, flatten=False),
    "traced flat before": functools.partial(traced_before, flatten=True),
    "traced": functools.partial(traced_after, flatten=False),
    "traced flat": traced_after,
    "fused": fused,
    "undone": undone,
}


def check_steps() -> dict[str, int]:
    found = {}
    for name, apply in STEPS.items():
        wanted, _, _ = outcome(Blocks, gradients, False, apply=apply)
        got, events, sch = outcome(Blocks, gradients, True, apply=apply)
        found[name] = events.overlapped
        assert_same(got, wanted, name)
        again = slapo.replay(Blocks().double(), sch.to_json(), mesh=sch.mesh, example_inputs=rand(2, 4, 6))
        assert [record.primitive for record in again.records] == [record.primitive for record in sch.records]
    return found


def test_traced_checkpointed_and_replayed_schedules_overlap() -> None:
    assert run_ranks(check_steps, world_size=2)[0] == dict.fromkeys(STEPS, 2)


def check_replicas() -> None:
    """Two replicas of two ranks each: three steps of AdamW."""
    found = []
    for overlap in (False, True):
        torch.manual_seed(0)
        sch = slapo.create_schedule(Mlp().double(), mesh={"dp": 2, "tp": 2})
        split(sch, overlap=overlap)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*never verified")
            engine = slapo.build(sch, optimizer=torch.optim.AdamW, loss=lambda y, _=None: y.square().mean())
        for step in range(3):
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank() // 2)
            engine.train_step(torch.randn(4, 6, dtype=torch.float64, generator=generator))
        found.append([parameter.detach().clone() for parameter in sch.model.parameters()])
    assert_same(found[1], found[0], "replicas")


@pytest.mark.breadth
def test_gradients_of_replicas_are_exchanged_beside_it() -> None:
    run_ranks(check_replicas, world_size=4)
