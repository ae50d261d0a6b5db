"""A model carries the steps of one schedule at a time."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.schedule import scheduled_models
from tests.messages import Messages
from tests.support.building import Split, SumOutput, real
from tests.support.edits import Call, Halve, HookAll, wrapped


def test_a_second_schedule_on_a_scheduled_model_is_refused_and_the_way_out_works(message: Messages) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    slapo.create_schedule(model)  # without steps, two are harmless
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    with pytest.raises(slapo.ArgumentError) as refused:
        slapo.create_schedule(model)
    message(refused, "this Sequential", "1 step")
    sch.undo(to=0)
    slapo.create_schedule(model)["0"].checkpoint()


def test_building_does_not_make_the_model_untouched_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    slapo.build(sch)
    del sch
    with pytest.raises(slapo.ArgumentError, match="another schedule"):
        slapo.create_schedule(model)


def test_a_step_that_fails_does_not_count() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(slapo.PreconditionError):
        slapo.create_schedule(model)["0"].annotate("wieght", "key", 1)
    slapo.create_schedule(model)


def test_models_are_forgotten_with_the_last_reference() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    before = len(scheduled_models._CLAIMS)
    del model, sch
    gc.collect()
    assert len(scheduled_models._CLAIMS) < before


def test_a_copy_of_the_untouched_model_is_a_model_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    with sch.reference() as untouched:
        fresh = copy.deepcopy(untouched)
    slapo.create_schedule(fresh)["0"].checkpoint()


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_second_schedule_of_a_model_is_refused(message: Messages) -> None:
    model = two_layers()
    first, second = slapo.create_schedule(model), slapo.create_schedule(model)
    first["0"].apply(Halve())
    weight = model[0].weight
    uses: list[Callable[[], Any]] = [
        lambda: second["0"].apply(Halve()),
        lambda: second["*"].apply(Halve()),
        lambda: slapo.build(second),
        lambda: slapo.verify(second, torch.randn(2, 4)),
        lambda: second.reference().__enter__(),
    ]
    told = set()
    for use in uses:
        with pytest.raises(slapo.ArgumentError) as refused:
            use()
        told.add(str(refused.value))
    message(*told, "this Sequential", "another schedule")
    assert model[0].weight is weight
    second.undo(to=0)  # of nothing: the other one's steps are not forgotten
    with pytest.raises(slapo.ArgumentError):
        second["0"].apply(Halve())
    first.undo(to=0)
    second["0"].apply(Halve())
    with pytest.raises(slapo.ArgumentError):
        first["1"].apply(Halve())


def test_submodule_and_container_of_a_scheduled_model_are_refused(message: Messages) -> None:
    model, part = nn.Sequential(two_layers(), nn.ReLU()), nn.Sequential(nn.Linear(4, 4))
    inner, whole, other = slapo.create_schedule(model[0]), slapo.create_schedule(model), slapo.create_schedule(part)
    whole["0.1"].apply(Halve())
    told = set()
    for use in (lambda: inner["0"].apply(Halve()), lambda: slapo.create_schedule(model[0])):
        with pytest.raises(slapo.ArgumentError) as refused:
            use()
        told.add(str(refused.value))
    message(*told, "is '0' of a Sequential", "reaches it: sch")
    whole.undo()
    inner["0"].apply(Halve())
    told.clear()
    for use in (lambda: whole["1"].apply(HookAll()), lambda: slapo.create_schedule(model)):
        with pytest.raises(slapo.ArgumentError) as refused:
            use()
        told.add(str(refused.value))
    message(*told, "'0' of this Sequential", "reaches it: sch")
    other["0"].apply(Halve())  # has nothing to do with the others


def test_models_that_share_a_module_are_refused(message: Messages) -> None:
    shared = nn.Linear(4, 4)
    first, second = nn.Sequential(shared, nn.ReLU()), nn.ModuleDict({"a": nn.ReLU(), "b": shared})
    slapo.create_schedule(first)["0"].apply(Halve())
    with pytest.raises(slapo.ArgumentError) as refused:
        slapo.create_schedule(second)
    message(refused, "'b' of this ModuleDict", "'0' of a Sequential")


def test_models_that_share_an_activation_are_two_models_until_a_step_changes_it(message: Messages) -> None:
    activation = nn.GELU()  # some models of transformers keep one for all their instances
    first, second = (nn.Sequential(nn.Linear(4, 4), activation) for _ in range(2))
    sch = slapo.create_schedule(first)
    sch["0"].checkpoint()
    slapo.create_schedule(second)["0"].checkpoint()
    sch["1"].checkpoint()
    third = nn.Sequential(nn.Linear(4, 4), activation)
    with pytest.raises(slapo.ArgumentError) as refused:
        slapo.create_schedule(third)
    message(refused, "'1' of this Sequential", "a copy")


STEPS: dict[str, tuple[Callable[[slapo.Schedule], Any], str]] = {
    "a piece": (lambda sch: sch["1"].apply(Halve()), "1"),
    "a replacement": (lambda sch: sch["1"].replace(nn.Linear(4, 4)), ""),
    "a hook": (lambda sch: sch["1"].apply(HookAll()), "1"),
    "a wrapper": (lambda sch: sch["1"].apply(Call(lambda node, edit: edit.wrap_forward(node, wrapped))), "1"),
    "an attribute": (lambda sch: sch["1"].apply(Call(lambda node, edit: edit.set_attribute(node, "n", 1))), "1"),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_copy_of_a_scheduled_model_is_refused(kind: str, message: Messages) -> None:
    model = two_layers()
    sch = slapo.create_schedule(model)
    step, changed = STEPS[kind]
    step(sch)
    twin = copy.deepcopy(model)
    with pytest.raises(slapo.ArgumentError) as refused:
        slapo.create_schedule(twin)
    message(refused, f"'{changed}' of this Sequential" if changed else "this Sequential", "a copy")
    if changed:
        with pytest.raises(slapo.ArgumentError) as refused:
            slapo.create_schedule(twin[1])
        message(refused, "this Linear", "a copy")
    slapo.create_schedule(copy.deepcopy(twin[0]))  # what no step changed is as its author made it


def test_an_unpickled_copy_and_a_copy_of_a_built_model_are_refused(message: Messages) -> None:
    model = two_layers()
    sch = slapo.create_schedule(model)
    sch["1"].apply(HookAll())
    sent = pickle.dumps(model)
    slapo.build(sch)
    built = copy.deepcopy(model)
    del model, sch
    gc.collect()
    told = set()
    for twin in (pickle.loads(sent), built, nn.ModuleList([built])[0]):
        with pytest.raises(slapo.ArgumentError) as refused:
            slapo.create_schedule(twin)
        told.add(str(refused.value))
    message(*told, "'1' of this Sequential", "a copy")


@pytest.mark.parametrize("kind", STEPS)
def test_a_copy_after_undo_is_as_good_as_the_model(kind: str) -> None:
    model = two_layers()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    sch = slapo.create_schedule(model)
    step, _ = STEPS[kind]
    step(sch)
    step(sch)
    sch.undo()
    with pytest.raises(slapo.ArgumentError):
        slapo.create_schedule(copy.deepcopy(model))  # one step is left
    sch.undo()
    slapo.create_schedule(copy.deepcopy(model))
    slapo.create_schedule(pickle.loads(pickle.dumps(model)))
    assert {name: list(module.__dict__) for name, module in model.named_modules()} == {
        name: list(state) for name, state in before.items()
    }


def test_inactive_step_leaves_no_mark() -> None:
    model = real("mlp")
    names = [list(module.__dict__) for module in model.modules()]
    sch = slapo.create_schedule(model, mesh={"tp": 1})
    sch["fc2"].apply(SumOutput())
    assert [list(module.__dict__) for module in model.modules()] == names
    sch["fc1"].apply(Split(("weight",)))
    with pytest.raises(slapo.ArgumentError):
        slapo.create_schedule(copy.deepcopy(model))
