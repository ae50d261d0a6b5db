"""Stages refuse a call that they were not made for: each check, and the same call without what it checks."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core import GuardError
from slapo_runtime.stages import StagedModel
from slapo_runtime.stages.signatures import StagedModels
from tests.messages import Messages

from .staging import cut

FACTOR = 2


class Config:
    double = True


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.0)
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)

    def forward(self, x: Any, mask: Any = None, kind: str = "sum") -> Any:
        h = self.frozen(x)
        h = self.drop(self.a(h))
        if mask is not None:
            h = h * mask
        if self.config.double:
            h = h * FACTOR
        return self.b(h).sum(-1) if kind == "sum" else self.b(h).mean(-1)


def rename(model: Model) -> None:
    model.b = nn.Linear(4, 4)


CALL = {"x": torch.rand(3, 4), "mask": torch.ones(3, 1), "kind": "sum"}
CHANGES: list[tuple[Callable[[Model], Any], dict[str, Any], tuple[str, ...]]] = [
    (lambda model: None, {"x": torch.rand(2, 4)}, ("stage 0", "'x'", "(2, 4)")),
    (lambda model: None, {"x": torch.rand(3, 4).double()}, ("stage 0", "'x'", "torch.float64")),
    (lambda model: None, {"mask": None}, ("stage 2", "'mask'", "(3, 1)")),
    (lambda model: model.eval(), {}, ("the model", "train() mode")),
    (lambda model: model.drop.eval(), {}, ("'drop'", "train() mode")),
    (lambda model: setattr(model.config, "double", False), {}, ("self.config.double == True",)),
    (lambda model: rename(model), {}, ("was replaced", "'b'")),
    (lambda model: model.register_forward_hook(lambda *_: None), {}, ("the root", "hook")),
    (lambda model: model.frozen.requires_grad_(), {}, ("'frozen'", "with a gradient")),
]


@pytest.mark.parametrize(("change", "call", "words"), CHANGES)
def test_each_check(
    change: Callable[[Model], Any], call: dict[str, Any], words: tuple[str, ...], message: Messages
) -> None:
    model = Model()
    made = cut(model, ["frozen", "a"], **CALL)
    made.run(CALL)
    change(model)
    with pytest.raises(GuardError) as caught:
        made.run({**CALL, **call})
    message(caught, *words)
    assert str(caught.value).startswith("stage ")


class Scaled(nn.Module):
    bend = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.config, self.weights = nn.Linear(4, 4), nn.Linear(4, 4), Config(), [1.0, 2.0]
        self.scale, self.shift = nn.Parameter(torch.ones(4)), 0.5

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            offset = x.mean() * sum(self.weights)
        return self.b(self.a(x) + self.shift + offset) * self.scale * self.bend * (2 if self.config.double else 1)


def hook_in_a_new_table(model: Scaled) -> None:
    model._forward_hooks = collections.OrderedDict()
    model.register_forward_hook(lambda *_: None)


LATER: dict[str, Callable[[Scaled], Any]] = {
    "shift": lambda model: setattr(model, "shift", 3.0),
    "weights": lambda model: model.weights.append(3.0),
    "config.double": lambda model: setattr(model.config, "double", False),
    "Single": lambda model: setattr(model, "config", Single()),
    "bend": lambda model: setattr(model, "bend", 2.0),
    "scale": lambda model: setattr(model.scale, "data", model.scale.data.double()),
    "'a'": lambda model: setattr(model, "a", nn.Linear(4, 4)),
    "the root": hook_in_a_new_table,
    "eval": lambda model: model.eval(),
    "forward": lambda model: setattr(model, "forward", lambda x: x),
}


class Single:
    double = False


@pytest.mark.parametrize("word", list(LATER))
def test_a_change_between_two_micro_batches_is_refused(word: str) -> None:
    model, x = Scaled(), torch.rand(3, 4)
    made = cut(model, ["a"], x)
    for _ in range(2):
        torch.testing.assert_close(made.run({"x": x}), model(x))
    LATER[word](model)
    with pytest.raises(GuardError) as caught:
        made.run({"x": x})
    assert word in str(caught.value)


def test_new_values_and_frozen_parameters_are_followed_between_two_micro_batches() -> None:
    model, x = Scaled(), torch.rand(3, 4)
    made = cut(model, ["a"], x)
    for _ in range(2):
        torch.testing.assert_close(made.run({"x": x}), model(x))
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    model.scale.requires_grad_(False)
    torch.testing.assert_close(made.run({"x": x}), model(x))
    assert torch.is_grad_enabled()


def test_guards_check_globals_autocast_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cut(Model(), ["a"], **CALL)
    made.run(CALL)
    with torch.autocast("cpu"), pytest.raises(GuardError, match="another autocast setting"):
        made.run(CALL)
    monkeypatch.setattr(f"{Model.__module__}.FACTOR", 3)
    with pytest.raises(GuardError, match="FACTOR == 2"):
        made.run(CALL)


def test_a_batch_under_another_setting_of_autocast_has_stages_of_its_own() -> None:
    sch = slapo.create_schedule(Model(), mesh={"pp": 2}, example_inputs=CALL)
    sch["a"].pipeline_split()
    stages = StagedModels(sch)

    def product() -> torch.dtype:
        found = stages.of(CALL, training=True, outputs=None, batch_axes=None)
        assert found is not None
        return next(iter(found.partition.stages[0].module(CALL, {}).values())).dtype

    assert product() == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert product() == torch.bfloat16
    assert product() == torch.float32


def test_a_value_of_another_shape_and_a_missing_argument(message: Messages) -> None:
    made: StagedModel = cut(Model(), ["a"], **CALL)
    last = made.partition.stages[1].module
    with pytest.raises(GuardError) as caught:
        last(CALL, {"a": torch.rand(2, 4)})
    message(caught, "stage 1", "'a' of shape (3, 4)", "(2, 4)")
    with pytest.raises(GuardError) as caught:
        last({}, {"a": torch.rand(3, 4)})
    message(caught, "stage 1", "'mask'")


def test_tensors_that_came_in_the_place_of_others_are_used() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            return self.b(self.a(x)) * self.scale

    model = Own()
    x = torch.rand(2, 4)
    made = cut(model, ["a"], x)
    with torch.no_grad():
        model.scale = nn.Parameter(torch.full((4,), 3.0))  # as materializing a model does
    torch.testing.assert_close(made.run({"x": x}), model(x))
    assert dict(made.partition.stages[1].module.named_parameters())["scale"] is model.scale


def test_a_list_of_modules_above_a_cut_that_became_longer_and_inside_of_a_module_that_is_called(
    message: Messages,
) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Loop(), torch.rand(2, 4)
    made = cut(model, ["layers.1"], x)
    model.layers[0].append(nn.Tanh())  # runs as it is
    torch.testing.assert_close(made.run({"x": x}), model(x))
    model.layers.append(nn.Linear(4, 4))
    with pytest.raises(GuardError) as caught:
        made.run({"x": x})
    message(caught, "stage 0", "'layers'")
