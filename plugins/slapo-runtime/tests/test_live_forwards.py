"""A forward that a tool sets on a live model after steps at its root: a warning where the steps do not run."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.up(x).tanh())


def fused(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.up(x).tanh() @ self.head.weight.T


def set_fused(model: Any) -> None:
    model.forward = types.MethodType(fused, model)


def wrap(model: Any) -> None:
    before = model.forward
    model.forward = lambda *args: before(*args)


def wrap_function(model: Any) -> None:
    model.forward = types.MethodType(
        functools.partial(lambda before, *args: before(*args), model.forward.__func__), model
    )


def keep_aside(model: Any) -> None:
    model.kept_forward = model.forward
    model.forward = types.MethodType(lambda self, x: self.kept_forward(x), model)


def warned(change: Callable[[Any], None], steps: str = "") -> tuple[list[str], Net]:
    model = Net()
    sch = slapo.create_schedule(model)
    (sch[steps] if steps else sch.root).checkpoint()
    change(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            model(torch.randn(2, 3)).sum().backward()
    return [str(each.message) for each in caught if "set on this Net" in str(each.message)], model


@pytest.mark.parametrize("change", [set_fused, lambda model: vars(model).pop("forward")])
def test_steps_at_the_root_that_a_new_forward_skips_are_warned_of_once(change: Callable[[Any], None]) -> None:
    found, model = warned(change)
    assert len(found) == 1
    assert "do not run" in found[0]
    assert "hint: set it before slapo.create_schedule(model)" in found[0]
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("change", [lambda model: None, wrap, wrap_function, keep_aside])
def test_forward_that_calls_the_steps_forward_is_accepted(change: Callable[[Any], None]) -> None:
    found, model = warned(change)
    assert not found
    assert not model._forward_pre_hooks


def test_a_step_that_does_not_run_on_this_mesh_is_no_matter(isolated_registry: Any) -> None:
    @slapo.register_primitive
    @dataclasses.dataclass(frozen=True)
    class Inactive(slapo.Primitive):
        name = "acme.inactive"
        equivalence = slapo.Equivalence.EXACT

        def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
            edit.wrap_forward(node, lambda forward: forward, active=False)

    model = Net()
    slapo.create_schedule(model).root.apply(Inactive())
    assert not model._forward_pre_hooks
    set_fused(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 3)).sum().backward()


def test_a_model_without_steps_at_its_root_has_no_hook() -> None:
    found, model = warned(set_fused, "up")
    assert not found
    model = Net()
    sch = slapo.create_schedule(model)
    assert not model._forward_pre_hooks
    sch.root.checkpoint()
    assert len(model._forward_pre_hooks) == 1
    copied = copy.deepcopy(model)
    copied(torch.randn(2, 3))
    assert not copied._forward_pre_hooks
    sch.undo()
    assert not model._forward_pre_hooks
    assert pickle.dumps(model.up)
