"""Compiled and fused blocks inside the stages of a pipeline, on two ranks, against one process."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo
from slapo_testing import run_ranks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def largest_difference(kind: str, schedule: str, cuts: tuple[int, ...]) -> float:
    net = Net().double()
    reference = copy.deepcopy(net)
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sch: Any = slapo.create_schedule(net, mesh={"pp": 2}, example_inputs=x)
    for number in cuts:
        sch[f"layers.{number}"].pipeline_split()
    for layer in sch["layers.*"]:
        if kind == "compile":
            layer.compile(backend="aot_eager")
        else:
            layer["up"].decompose()
            layer.trace(flatten=True)
            layer.fuse(lambda h, bias: F.gelu(h + bias), compiler="aot_eager")
    engine: Any = slapo.build(
        sch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), pipeline_schedule=schedule, microbatches=4
    )
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        reference(x).backward()
        optimizer.step()
        engine.train_step(x)
    state = engine.state_dict()
    return max(float((state[name] - one).abs().max()) for name, one in reference.state_dict().items())


def on_rank() -> list[float]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the zero-bubble schedule says that it keeps these backward passes whole
    runs = [("compile", "zbv_zero_bubble", (0, 1, 2)), ("fuse", "1f1b", (1,)), ("fuse", "zbv_zero_bubble", (0, 1, 2))]
    return [largest_difference(*run) for run in runs]


@pytest.mark.ranks
def test_compiled_and_fused_blocks_train_in_stages() -> None:
    for found in run_ranks(on_rank, world_size=2, timeout=300):
        assert all(difference < 1e-12 for difference in found), found


class Dropping(Layer):
    """Its pattern spans modules: one of ours, whose code is looked into, and two of torch's, which are swallowed."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(self.down(F.gelu(self.up(x)))) + x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("traced_in_training", [True, False])
def test_a_pattern_that_spans_modules_is_found_while_stages_are_recorded(traced_in_training: bool) -> None:
    """In the mode in which it was found, and in the other one, whose graph is recorded together with the stages."""
    net, x = Net(), torch.randn(4, 8)
    net.layers = nn.ModuleList(Dropping() for _ in range(4))
    sch: Any = slapo.create_schedule(net.train(traced_in_training), example_inputs=x)
    for layer in sch["layers.*"]:
        layer["down"].decompose()
        layer.trace(flatten=True)
        layer.fuse("fusion.bias_dropout_add_norm", compiler="eager", name="fused")
    sch["layers.1"].pipeline_split()
    slapo.verify(sch, x)
    for training in (True, False):
        net.train(training)
        assert len(slapo.stages(sch, x).partition.stages) == 2
