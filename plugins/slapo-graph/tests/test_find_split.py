"""Layers that are split or synced and traced flat are found by path and class, as before the split."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_graph.patterns import call_module


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(F.gelu(self.up(x))) + x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.Conv2d(8, 4, 3, padding=1, bias=False)
        self.bn_one, self.bn_two = nn.BatchNorm2d(8), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn_one(self.one(x)))
        return torch.relu(self.bn_two(self.two(y)) + x)


def split(node: slapo.Node, first: str, last: str) -> None:
    names = [name for name in ("weight", "bias") if node[first].parameters.get(name) is not None]
    node[first].shard(names, axis=0).sync("bwd_post", "all_reduce")
    node[last].shard("weight", axis=1).sync("fwd_post", "all_reduce")


MLP: tuple[Any, ...] = (
    lambda x: F.gelu(call_module("up", x)),
    lambda x, y: call_module("norm", call_module("down", x) + y),
    lambda x: call_module("Linear", x),
    "up",
    "down",
    re.compile("^up$"),
    re.compile("Linear"),
)
CONV: tuple[Any, ...] = (
    lambda x: torch.relu(call_module("bn_one", call_module("one", x))),
    lambda x, y: torch.relu(call_module("bn_two", call_module("two", x)) + y),
    lambda x: call_module("Conv2d", x),
    "two",
)


def counts(model: nn.Module, x: torch.Tensor, patterns: tuple[Any, ...], *, layers: tuple[str, str] | None) -> Any:
    sch = slapo.create_schedule(nn.Sequential(model), mesh={"tp": 2}, example_inputs=x)
    if layers is not None:
        split(sch["0"], *layers)
        if layers[0] == "one":
            sch["0.bn_one"].shard(["weight", "bias", "running_mean", "running_var"], axis=0)
    sch["0"].trace(flatten=True)
    return sch, [len(sch.find(pattern)) for pattern in patterns]


def test_a_split_layer_is_found_by_its_path_as_before_the_split() -> None:
    x = torch.randn(2, 8)
    sch, found = counts(Mlp(), x, MLP, layers=("up", "down"))
    assert found == counts(Mlp(), x, MLP, layers=None)[1] == [1, 1, 2, 1, 1, 1, 2]
    (match,) = sch.find("down")
    assert match.nodes == ("linear_1", "all_reduce_", "type_as", "add")
    assert match.inputs[0] == "gelu"
    assert match.outputs == ("add",)
    sch["0"].checkpoint(match=MLP[0])
    assert [len(sch.find(pattern)) for pattern in MLP] == [0, 1, 1, 0, 1, 0, 1]
    images = torch.randn(2, 4, 6, 6)
    assert counts(Residual(), images, CONV, layers=("one", "two"))[1] == [1, 1, 2, 1]
