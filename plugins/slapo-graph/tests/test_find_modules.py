"""Modules in patterns, and calls of modules in graphs: torch.nn's own are what they compute, with their settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_graph import patterns

from .finding import Block, found, total, traced

X, Y = torch.randn(2, 4), torch.randn(2, 4)


def test_a_module_is_a_pattern_of_the_same_settings_and_shapes() -> None:
    schedule = traced(Block(), X, Y)
    names = ("dense", "dropout", "add", "norm")
    (match,) = schedule.find(Block())
    assert match.nodes == names
    assert match.inputs == (
        "x", "residual", "self.dense.weight", "self.dense.bias", "self.norm.weight", "self.norm.bias",
    )  # fmt: skip
    assert match.captures["dense.weight"] == "self.dense.weight"
    assert not schedule.find(Block(epsilon=1e-6))
    assert not schedule.find(Block(8))
    with torch.device("meta"):
        assert found(schedule, Block()) == [names]
    assert found(schedule, nn.Linear(4, 4)) == [("dense",)]
    assert not schedule.find(nn.Linear(4, 4, bias=False))
    assert not schedule.find(nn.Dropout(0.2))


@pytest.mark.parametrize("training", [True, False])
def test_a_module_in_a_pattern_follows_the_mode_of_the_model(training: bool) -> None:
    model = Block().train(training)
    schedule = traced(model, X, Y)
    assert len(schedule.find(Block())) == 1
    assert len(schedule.find(lambda x, y: F.dropout(x, 0.1) + y)) == training
    assert len(schedule.find(lambda x, y: F.dropout(x, 0.1, training=patterns.any_constant()) + y)) == 1


def test_modules_of_torch_are_their_functions_as_long_as_nothing_else_runs() -> None:
    model = Block()
    schedule = traced(model, X, Y)
    pattern = F.linear
    assert found(schedule, pattern) == []  # it has a bias
    assert found(schedule, lambda x, w, b: F.linear(x, w, b)) == [("dense",)]
    handle = model.dense.register_forward_hook(lambda module, args, out: out * 2)
    assert found(schedule, lambda x, w, b: F.linear(x, w, b)) == []
    assert found(schedule, lambda x: patterns.call_module("dense", x)) == [("dense",)]
    handle.remove()
    assert found(schedule, lambda x, w, b: F.linear(x, w, b)) == [("dense",)]


def test_settings_are_read_anew_each_time() -> None:
    model = Block()
    schedule = traced(model, X, Y)
    assert len(schedule.find(lambda x: F.dropout(x, 0.1))) == 1
    model.dropout.p = 0.3
    assert len(schedule.find(lambda x: F.dropout(x, 0.1))) == 0
    assert len(schedule.find(lambda x: F.dropout(x, 0.3))) == 1


def test_shapes_and_predicates_are_asked_each_time() -> None:
    model = Block()
    schedule = traced(model, X, Y)
    wanted = {"dropout"}
    named, dense = patterns.where(lambda node: node.name in wanted), nn.Linear(4, 4)
    assert found(schedule, named) == [("dropout",)]
    assert found(schedule, dense) == [("dense",)]
    wanted.add("add")
    model.dense.weight = nn.Parameter(torch.randn(8, 4))
    assert found(schedule, named) == [("dropout",), ("add",)]
    assert found(schedule, dense) == []


def test_modules_that_do_more_than_their_function_are_no_call_of_it() -> None:
    images = torch.randn(2, 3, 8, 8)

    def apply(x: torch.Tensor, below: nn.Module) -> Any:
        return below(x)

    def convolution(x: Any, w: Any, b: Any) -> Any:
        return F.conv2d(x, w, b, padding=1)

    normal = traced(apply, images, below=nn.Conv2d(3, 3, 3, padding=1))
    reflecting = traced(apply, images, below=nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"))
    assert [len(each.find(convolution)) for each in (normal, reflecting)] == [1, 0]
    assert [len(each.find(nn.Conv2d(3, 3, 3, padding=1))) for each in (normal, reflecting)] == [1, 0]
    pattern = nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect")
    assert [len(each.find(pattern)) for each in (normal, reflecting)] == [0, 1]

    def normalized(x: Any, mean: Any, var: Any, w: Any, b: Any) -> Any:
        return F.batch_norm(x, mean, var, w, b)

    assert total(normalized, apply, images, below=nn.BatchNorm2d(3).eval()) == 1
    assert total(normalized, apply, images, below=nn.BatchNorm2d(3)) == 0  # it counts batches
    assert total(nn.BatchNorm2d(3), apply, images, below=nn.BatchNorm2d(3)) == 1
