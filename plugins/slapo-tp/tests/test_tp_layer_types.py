"""Layers of others, split after one call of `register_layer`: docs/guides/layer-types.md, and its mistakes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_runtime.ranks.consistency import obligations
from slapo_tp import Axis, LayerType, register_layer
from slapo_tp.layers import layer_type_of
from tests.messages import Messages
from tests.support.programs import run_program

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "layer-types.md"
FEATURES = (Axis("output", "out_features"), Axis("input", "in_features"))


def program() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return found


@pytest.mark.ranks
def test_the_program_of_the_page_is_verified(tmp_path: Path) -> None:
    script = tmp_path / "layers.py"
    script.write_text(program(), encoding="utf-8")
    assert run_program(script).splitlines()[-1] == "15 steps verified on 2 ranks"


@pytest.fixture
def page() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(program(), str(PAGE), "exec"), names)
    return names


def test_layer_attributes_follow_the_shard(page: dict[str, Any]) -> None:
    model = page["schedule"]({"tp": 2}).model
    assert (model.lora_up.out_features, model.lora_down.in_features, model.int8_up.out_features) == (16, 16, 16)
    assert (model.lora_up.in_features, model.lora_down.out_features) == (16, 16)
    sch: Any = slapo.create_schedule(page["Model"](), mesh={"tp": 2})
    sch["lora_down"].shard(["weight", "a"], axis=1)
    sch["experts"].shard("up", axis=2).shard("down", axis=1)
    assert [str(each).partition("; ")[2] for each in obligations(sch)] == [
        'add sch[\'lora_down\'].sync("fwd_post", "all_reduce")',
        'add sch[\'experts\'].sync("fwd_post", "all_reduce")',
    ]


class Scaled(nn.Module):
    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features, features)), nn.Parameter(torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) * 2


class Doubled(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Named(Scaled):
    pass


register_layer(Scaled, LayerType("Scaled", (Axis("output"), Axis("input"))))


def test_a_type_holds_for_the_forward_that_it_was_registered_with() -> None:
    assert layer_type_of(Named()) is layer_type_of(Scaled())
    assert layer_type_of(Scaled()) is not None
    assert layer_type_of(Doubled()) is None
    register_layer(Scaled, LayerType("Scaled", (Axis("output"), Axis("input"))))  # the same once more


def test_a_bias_that_would_be_added_on_every_rank_is_refused(message: Messages) -> None:
    sch: Any = slapo.create_schedule(nn.Sequential(Scaled()), mesh={"tp": 2})
    with pytest.raises(slapo.PreconditionError) as refused:
        sch["0"].shard("weight", axis=1)
    message(refused, "adds its bias on every rank", "without_bias=")
    sch["0"].shard(["weight", "bias"], axis=0)  # the other axis adds it once


def test_an_axis_that_cannot_be_split_is_refused(page: dict[str, Any], message: Messages) -> None:
    sch: Any = slapo.create_schedule(page["Model"](), mesh={"tp": 3})
    with pytest.raises(slapo.PreconditionError) as refused:
        sch["experts"].shard("down", axis=0)
    message(refused, "axis 0 of 'down'", "axis=1 (hidden) or axis=2 (output)")


@pytest.mark.parametrize(
    ("layer_class", "axes", "word"),
    [
        (nn.Module, FEATURES, "has no forward"),
        (nn.Linear, FEATURES, "nn.Linear, which is registered already"),
        (Named, FEATURES, "Scaled, which is registered already"),
        (Doubled, (Axis("vocabulary"), Axis("output")), "has a vocabulary"),
    ],
)
def test_invalid_registrations_are_refused(layer_class: Any, axes: Any, word: str, message: Messages) -> None:
    with pytest.raises(slapo.ArgumentError) as refused:
        register_layer(layer_class, LayerType("Other", axes))
    message(refused, word)
