"""Predictions from one profile of few blocks, compared with the estimate of the step itself."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_core.errors import ArgumentError
from slapo_estimate.block_profile import RegionCosts, StepProfile
from slapo_estimate.composition import Layout, balanced_cuts, predict
from slapo_estimate.depth import first_samples, profile_step, samples_of
from slapo_estimate.device import DEVICES, DeviceSpec, Link
from slapo_estimate.reduced_model import BlockKinds, reduce_model

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)
BLOCKS = 7
SAMPLES = 16


class Layer(nn.Module):
    def __init__(self, number: int, rate: float = 0.0) -> None:
        super().__init__()
        self.number, self.rate = number + 3, rate
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out((q @ k.transpose(-1, -2) / 8).softmax(-1) @ v)
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Blocks with an operation between them, of two kinds if ``rates`` are."""

    def __init__(self, blocks: int = BLOCKS, rates: Sequence[float] = ()) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 512)
        self.blocks = nn.ModuleList(Layer(n, rates[n] if rates else 0.0) for n in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x).square().mean()


def on_meta(**options: Any) -> Net:
    with torch.device("meta"):
        return Net(**options)


def split(sch: slapo.Schedule) -> None:
    blocks: Any = sch["blocks.*"]
    blocks["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    blocks["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [Layout(2, 3, 1, False, 4)], ids=str)
def test_predictions_agree_with_the_estimate_of_the_step(layout: Layout) -> None:
    """With checkpoints; within a few percent of memory and time."""
    check(layout)


@pytest.mark.ranks
@pytest.mark.breadth
@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, 1, 1, False, 1),
        Layout(2, 1, 1, False, 4),
        Layout(1, 1, 4, False, 1),
        Layout(1, 1, 4, False, 2),
        Layout(1, 1, 4, True, 2),
        Layout(1, 2, 2, False, 4),
        Layout(1, 2, 2, True, 4),
        Layout(2, 1, 2, True, 1),
    ],
    ids=str,
)
def test_predictions_agree_with_the_estimate_of_any_engine(layout: Layout) -> None:
    check(layout)


def check(layout: Layout) -> None:
    device, model = DEVICES["a100"], on_meta()
    blocks = BlockKinds.of(model)
    batch = torch.empty(SAMPLES, 96, 32, device="meta")
    replica = first_samples(batch, SAMPLES // layout.dp)
    micro = first_samples(replica, SAMPLES // layout.dp // layout.microbatches)
    profile = profile_step(model, blocks, split, micro, mesh={"tp": layout.tp}, device=device, optimizer=ADAMW)
    free = predict(profile, blocks.kinds, layout, device, None)
    assert free is not None
    bounded = predict(profile, blocks.kinds, layout, device, int(0.8 * free.memory))
    assert bounded is not None
    assert bounded.checkpointed
    assert not free.checkpointed
    sch: Any = slapo.create_schedule(on_meta(), mesh={**layout.mesh, "tp": layout.tp}, example_inputs=replica)
    split(sch)
    for number in bounded.checkpointed:
        sch[blocks.paths[number]].checkpoint()
    for number in bounded.cuts:
        sch[blocks.paths[number]].pipeline_split()
    found = sch.estimate(replica, optimizer=ADAMW, device=device, **layout.options)
    assert bounded.memory == pytest.approx(found.memory.total, rel=0.06)
    assert bounded.time == pytest.approx(found.time, rel=0.08)


def costs(seconds: float) -> RegionCosts:
    return RegionCosts(forward=seconds / 3, backward=2 * seconds / 3)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_cuts_have_the_fastest_slowest_stage_of_all_cuts(stages: int) -> None:
    seconds = {0: 3.0, 1: 5.0, 2: 1.0}
    kinds = (0, 1, 2, 2, 1, 0, 2)
    profile = StepProfile(
        1, costs(2.0), costs(7.0), {k: costs(s) for k, s in seconds.items()}, {0: None, 1: None, 2: None}
    )

    def slowest(cuts: Sequence[int]) -> float:
        own = [seconds[kind] for kind in kinds]
        own[0], own[-1] = own[0] + 2.0, own[-1] + 7.0
        edges = [0, *(cut + 1 for cut in cuts), len(kinds)]
        return max(sum(own[begin:end]) for begin, end in itertools.pairwise(edges))

    best = min(map(slowest, itertools.combinations(range(len(kinds) - 1), stages - 1)))
    found = balanced_cuts(profile, kinds, stages)
    assert len(found) == stages - 1
    assert slowest(found) == pytest.approx(best)


@pytest.mark.parametrize("shards", [False, True], ids=["replicas", "shards"])
def test_messages_take_the_cores_of_a_cpu_and_overlap_on_a_gpu(shards: bool) -> None:
    """The step on a CPU is longer by the time that a GPU's messages overlap."""
    block = dataclasses.replace(costs(0.3), parameters=40_000_000, trained=40_000_000, tensors=1, largest=40_000_000)
    profile = StepProfile(1, RegionCosts(), RegionCosts(), {0: block}, {0: None})
    gpu = DeviceSpec("gpu", {}, bandwidth=1e15, launch=0.0, links={"*": Link(4e9, 0.0)}, type="cuda")
    times = []
    for device in (gpu, dataclasses.replace(gpu, type="cpu")):
        found = predict(profile, (0,) * 4, Layout(1, 1, 2, shards, 1), device, None)
        assert found is not None
        times.append(found.time)
    all_reduces, gathers, reductions = 4 * 0.01, 8 * 0.005, 4 * 0.005
    assert times[1] == pytest.approx(1.2 + (gathers + reductions if shards else all_reduces), rel=1e-3)
    assert 1.2 < times[0] < times[1]


def test_kinds_are_by_structure_and_settings_without_the_blocks_own_number() -> None:
    assert BlockKinds.of(Net(4)).kinds == (0, 0, 0, 0)
    assert BlockKinds.of(Net(4, rates=(0.0, 0.1, 0.2, 0.0))).kinds == (0, 1, 1, 0)
    other = Net(4)
    other.blocks[2].up = nn.Linear(64, 256, bias=False)
    assert BlockKinds.of(other).kinds == (0, 0, 1, 0)


def test_a_reduced_model_keeps_two_blocks_of_each_kind_and_leaves_the_model() -> None:
    model = Net(6, rates=(0.0, 0.1, 0.0, 0.1, 0.1, 0.0))
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    reduced = reduce_model(model, BlockKinds.of(model))
    assert (reduced.paths, reduced.kinds) == (("blocks.0", "blocks.1", "blocks.2", "blocks.3"), (0, 1, 0, 1))
    assert reduced.checkpointed() == ("blocks.0", "blocks.1")
    assert [each.number for each in reduced.model.blocks] == [3, 4, 5, 6]
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    x = torch.randn(2, 5, 32)
    assert reduced.model(x).isfinite()


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no samples"):
        samples_of({"scale": 2.0})
