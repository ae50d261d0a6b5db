"""Hooks that the user registered on a parameter are carried over to what takes its place, or the step is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing.snapshot import ModelSnapshot
from tests.messages import Messages
from tests.support.building import adam, batches, on_meta, real, sgd
from tests.support.edits import Call, Halve


class Calls:
    """One hook of each kind on a parameter, and what they saw."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.seen: list[str] = []
        self.gradient = parameter.register_hook(self.double)
        self.accumulated = parameter.register_post_accumulate_grad_hook(self.note)

    def double(self, gradient: torch.Tensor) -> torch.Tensor:
        self.seen.append(f"gradient {tuple(gradient.shape)}")
        return 2 * gradient

    def note(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.seen.append(f"accumulated {tuple(parameter.shape)}")


BOTH = ["gradient (4, 4)", "accumulated (4, 4)"]


def gradient_of(model: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    assert weight.grad is not None
    return weight.grad.clone()


def other_values(node: slapo.Node, edit: slapo.Edit) -> None:
    edit.set_parameter(node, "weight", torch.ones(4, 4))


def other_module(node: slapo.Node, edit: slapo.Edit) -> None:
    edit.replace_module(node, nn.Linear(4, 4))


def under_another_name(node: slapo.Node, edit: slapo.Edit) -> None:
    edit.replace_module(node, nn.Sequential(nn.Linear(4, 4)), moved={"weight": "0.weight", "bias": "0.bias"})


def the_same_tensor(node: slapo.Node, edit: slapo.Edit) -> None:
    new = nn.Linear(4, 4)
    new.weight = node.parameters["weight"]
    edit.replace_module(node, new)


@pytest.mark.parametrize("change", [other_values, other_module, under_another_name, the_same_tensor])
def test_hooks_go_to_the_tensor_of_the_same_shape_and_come_back_with_undo(change: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    old = model[0].weight
    calls = Calls(old)
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model)
    sch["0"].apply(Call(change))
    new = next(model.parameters())
    gradient = gradient_of(model, new)
    assert calls.seen == BOTH
    sch.undo()
    model.zero_grad()
    assert before.differences(model) == []
    if new is not old:
        assert (new._backward_hooks, new._post_accumulate_grad_hooks) == (None, None)
    calls.seen.clear()
    gradient_of(model, old)
    assert calls.seen == BOTH

    sch["0"].apply(Call(change))
    now = next(model.parameters())
    calls.gradient.remove()  # the user's own handles still remove them
    calls.accumulated.remove()
    calls.seen.clear()
    assert torch.equal(2 * gradient_of(model, now), gradient)
    assert calls.seen == []


def test_hooks_of_the_new_tensor_stay_beside_those_of_the_old_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    old, new = Calls(model[0].weight), nn.Parameter(torch.ones(4, 4))
    own = Calls(new)
    sch = slapo.create_schedule(model)
    sch["0"].apply(Call(lambda node, edit: edit.set_parameter(node, "weight", new)))
    gradient_of(model, new)
    assert (old.seen, own.seen) == (BOTH, BOTH)
    sch.undo()
    gradient_of(model, model[0].weight)
    assert (old.seen, own.seen) == (2 * BOTH, BOTH)


def to_none(node: slapo.Node, edit: slapo.Edit) -> None:
    edit.set_parameter(node, "weight", None)


REFUSED: dict[str, tuple[Any, str]] = {
    "a piece": (Halve(), "shape (2, 4)"),
    "nothing": (Call(to_none), "no tensor"),
    "another shape": (
        Call(lambda node, edit: edit.replace_module(node, nn.Linear(4, 2))),
        "shape (2, 4)",
    ),
    "lost": (Call(lambda node, edit: edit.replace_module(node, nn.Identity())), "no tensor"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_step_that_would_lose_hooks_is_refused(kind: str, message: Messages) -> None:
    step, word = REFUSED[kind]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    calls = Calls(model[0].weight)
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    before = ModelSnapshot(model)
    with pytest.raises(slapo.ApplyError) as refused:
        sch["0"].apply(step)
    message(refused, "'0.weight' of shape (4, 4)", "(register_hook, register_post_accumulate_grad_hook)", word)
    assert before.differences(model) == []
    calls.accumulated.remove()
    with pytest.raises(slapo.ApplyError, match=r"\(register_hook\)"):
        sch["0"].apply(step)
    calls.gradient.remove()
    sch["0"].apply(step)


def test_a_tie_with_a_tensor_that_has_other_hooks_is_refused_and_what_is_dropped_takes_its_hooks_along() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    Calls(model[0].weight)
    sch = slapo.create_schedule(model)
    with pytest.raises(slapo.ApplyError, match="another tensor of the model"):
        sch["0"].apply(Call(lambda node, edit: edit.set_parameter(node, "weight", model[1].weight)))
    drop = Call(lambda node, edit: edit.replace_module(node, nn.Identity(), dropped=["weight", "bias"]))
    sch["0"].apply(drop)
    sch.undo()
    assert model[0].weight._backward_hooks


@pytest.mark.parametrize("make", [on_meta, real], ids=["meta", "real"])
@pytest.mark.parametrize("has_weights", [True, False], ids=["weights", "none"])
def test_building_keeps_hooks(make: Callable[[str], nn.Module], has_weights: bool) -> None:
    model = make("mlp")
    calls = Calls(model.fc1.weight)
    weights = real("mlp", seed=2).state_dict() if has_weights else None
    engine = slapo.build(slapo.create_schedule(model), optimizer=sgd, weights=weights)
    engine.train_step(next(batches(1)))
    assert calls.seen == ["gradient (8, 6)", "accumulated (8, 6)"]


def test_a_build_that_fails_gives_the_hooks_back() -> None:
    model = on_meta("mlp")
    Calls(model.fc1.weight)
    before = ModelSnapshot(model)
    with pytest.raises(ZeroDivisionError):
        slapo.build(slapo.create_schedule(model), optimizer=lambda _: 1 / 0)
    assert before.differences(model) == []


def test_another_device_keeps_hooks() -> None:
    model = real("mlp")
    calls = Calls(model.fc1.weight)
    slapo.build(slapo.create_schedule(model), device="meta")
    assert model.fc1.weight.is_meta
    model(torch.ones(2, 6, device="meta"), torch.ones(2, 4, device="meta")).backward()
    assert calls.seen == ["gradient (8, 6)", "accumulated (8, 6)"]


def test_an_optimizer_inside_of_the_backward_pass_trains_what_build_made() -> None:
    def trained(model: nn.Module) -> Any:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        return model

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(0.1 * parameter.grad)

    weights = real("mlp").state_dict()
    plain, engine = (
        trained(real("mlp")),
        slapo.build(slapo.create_schedule(trained(on_meta("mlp"))), weights=copy.deepcopy(weights), optimizer=adam),
    )
    batch = next(batches(1))
    plain(**batch).backward()
    engine.module(**batch).backward()
    assert all(torch.equal(tensor, plain.state_dict()[key]) for key, tensor in engine.state_dict().items())
