"""A module of which some tensors have no memory is recorded as if they were where its arguments are."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

import slapo_core as slapo
from slapo_runtime.stages import staged
from tests.support.staged import Chain, batch, chain


class Reads(nn.Module):
    """Reads the device of a parameter, writes to a buffer, and branches on neither."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.second(self.first(x)))
        return x + torch.arange(4, device=self.first.weight.device) + self.second.weight[0]


def facts(model: nn.Module, cut: str, inputs: dict[str, Any]) -> Any:
    sch = slapo.create_schedule(model)
    sch[cut].pipeline_split()
    found = staged(sch, inputs)
    assert found is not None
    parts = found.partition
    stages = [(s.inputs, s.uses, s.makes, sorted(dict(s.module.named_parameters()))) for s in parts.stages]
    return stages, parts.values, parts.ties, parts.output.names, found.liveness


def without_memory(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    for name in names:
        model.get_submodule(name).to("meta")
    if isinstance(model, Chain):
        model.head.weight = model.embed.weight  # to() makes two parameters of a tied one
    return model


def test_stages_are_the_same_wherever_the_tensors_are() -> None:
    for make, cut, inputs, places in (
        (Reads, "first", {"x": torch.randn(3, 4)}, ("first", "second", "norm", "")),
        (chain, "blocks.1", batch(0), ("blocks.0", "blocks.3", "blocks", "")),
    ):
        whole = facts(make(), cut, inputs)
        for place in places:
            assert facts(without_memory(make(), (place,)), cut, inputs) == whole
        assert facts(without_memory(make(), places[:2]), cut, inputs) == whole


def test_a_recording_releases_the_parameters() -> None:
    """Also where an operation saves its own result: a rank gives up the tensors of other stages after it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
    facts(model, "1", {"input": torch.ones(2, 4)})
    gone = weakref.ref(model[0].weight)
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    gc.collect()
    assert gone() is None
