"""What a forward reads from objects, lists and second names counts when it changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo

from . import hostile_holders as holders
from .test_trace_hostile import Enclosing, X, assert_equal, outcome


def ones() -> nn.Module:
    layer = nn.Linear(4, 4)
    nn.init.ones_(layer.weight), nn.init.zeros_(layer.bias)
    return layer


NEW = torch.tensor(9.0)
# Forward, and what changes.
CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "module of two names": (holders.two_names, lambda m: setattr(m, "alias", ones())),
    "tied parameter": (holders.tied, lambda m: setattr(m.second, "weight", nn.Parameter(torch.ones(4, 4)))),
    "tensor of an object": (holders.tensor_of_object, lambda m: setattr(m.holder, "tensor", NEW)),
    "slots": (holders.slots, lambda m: setattr(m.slots, "gain", 9.0)),
    "attribute of a module in a list": (holders.module_in_list, lambda m: setattr(m.scales[0], "gain", 9.0)),
    "module in a list": (holders.module_in_list, lambda m: m.scales.__setitem__(0, holders.Scale(9.0))),
    "object in a table": (holders.object_in_table, lambda m: setattr(m.table["one"], "gain", 9.0)),
    "tensor in a global table": (holders.global_tensors, lambda _: holders.TENSORS.update(gain=NEW)),
    "own dictionary": (holders.own_dictionary, lambda m: setattr(m, "gain", 9.0)),
    "variables of an object": (holders.variables, lambda m: setattr(m.holder, "gain", 9.0)),
}


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_tensors_held_by_other_objects_are_guarded(name: str, flatten: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "TENSORS", {"gain": torch.tensor(2.0)})
    forward, change = CHANGES[name]
    torch.manual_seed(0)
    plain = Enclosing(holders.model(forward)())
    twin = copy.deepcopy(plain)
    slapo.create_schedule(twin, example_inputs=X)["below"].trace(flatten=flatten)
    assert_equal(outcome(twin, (X,), {}), outcome(plain, (X,), {}))
    assert_equal(outcome(copy.deepcopy(twin), (X,), {}), outcome(plain, (X,), {}))
    change(plain.below), change(twin.below)
    assert_equal(outcome(twin, (X,), {}), outcome(plain, (X,), {}))


def test_inference_mode_has_its_own_graph() -> None:
    plain = Enclosing(holders.model(holders.inference_mode)())
    twin = copy.deepcopy(plain)
    slapo.create_schedule(twin, example_inputs=X)["below"].trace()
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            assert torch.equal(twin(X), plain(X))


@pytest.mark.parametrize("name", ["graph", "code"])
def test_a_module_may_be_named_as_an_attribute_of_a_graph_module(name: str) -> None:
    plain = nn.Sequential()
    plain.add_module(name, ones())
    twin = copy.deepcopy(plain)
    slapo.create_schedule(twin, example_inputs=X).trace(flatten=True)
    assert torch.equal(twin(X), plain(X))
