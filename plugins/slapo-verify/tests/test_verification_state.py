"""State that outlives a call is compared: what is kept from call to call, and what a step freezes on the quiet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core import Node
from slapo_core.internals import Edit
from tests.messages import Messages

ONE_SAMPLE = (
    "a batch of 1 was not compared, because the reference model raises: ValueError: Expected more than 1 value per "
    "channel when training, got input size torch.Size([1, 8])"
)
"""BatchNorm does not train on one."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn, self.fc2 = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.bn(self.fc1(x))))


@dataclass(frozen=True)
class Wrap(slapo.Primitive):
    """Wrap the forward in one of the mistakes below."""

    name = "state.wrap"
    equivalence = slapo.Equivalence.EXACT
    mistake: str

    def apply(self, node: Node, edit: Edit) -> None:
        edit.wrap_forward(node, _MISTAKES[self.mistake])


@dataclass(frozen=True)
class Freeze(slapo.Primitive):
    """Freeze a parameter, and say so or not."""

    name = "state.freeze"
    equivalence = slapo.Equivalence.EXACT
    parameter: str
    says_so: bool

    def apply(self, node: Node, edit: Edit) -> None:
        if self.says_so:
            edit.set_requires_grad(node, self.parameter, False)
        else:
            node.module.get_parameter(self.parameter).requires_grad_(False)
            edit.annotate(node, self.parameter, "note", "nothing else")


def _cached_weight(forward: Any) -> Any:
    """The weight of the first call without gradients serves all later ones."""

    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return forward(module, x)
        module.__dict__.setdefault("kept", module.weight.detach().clone())
        return nn.functional.linear(x, module.kept, module.bias)

    return run


def _statistics_in_evaluation(forward: Any) -> Any:
    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = forward(module, x)
        if not module.training:
            module.running_mean += 0.25
        return out

    return run


def _from_the_second_step_on(forward: Any) -> Any:
    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = forward(module, x)
        calls = module.__dict__["calls"] = module.__dict__.get("calls", 0) + module.training
        if calls > 1 and module.training:
            module.running_var = module.running_var * 1.5
        return out

    return run


_MISTAKES = {
    "cached weight": _cached_weight,
    "statistics in evaluation": _statistics_in_evaluation,
    "from the second step on": _from_the_second_step_on,
}


def failure(sch: slapo.Schedule) -> slapo.VerifyError:
    torch.manual_seed(1)
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(sch, torch.randn(5, 6))
    return caught.value


@pytest.mark.parametrize(
    ("mistake", "path", "tensor"),
    [
        ("cached weight", "fc1", "output in evaluation mode after 3 optimizer steps"),
        ("statistics in evaluation", "bn", "buffer bn.running_mean after a forward in evaluation mode"),
        ("from the second step on", "bn", "output in evaluation mode after 3 optimizer steps"),
    ],
)
def test_difference_in_a_later_call_is_found_and_blamed(mistake: str, path: str, tensor: str) -> None:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Net())
    sch["fc2"].checkpoint()
    sch[path].apply(Wrap(mistake))
    error = failure(sch)
    assert error.tensor == tensor
    assert ": it differs" in error.message.splitlines()[0]
    assert error.steps == (f"#2 wrap('{mistake}') at '{path}'",)


@pytest.mark.parametrize(("path", "name"), [("fc1", "weight"), ("unused", "bias")])
def test_undeclared_freezing_is_found_and_blamed(path: str, name: str, message: Messages) -> None:
    sch = slapo.create_schedule(Net())
    sch["fc2"].checkpoint()
    sch[path].apply(Freeze(name, says_so=False))
    error = failure(sch)
    message(error, f"parameter {path}.{name}", "frozen in the scheduled model")
    assert error.steps == (f"#2 freeze('{name}', says_so=False) at '{path}'",)
    assert (error.path, error.tensor) == (path, f"{path}.{name}")
    assert error.hint == f"edit.set_requires_grad(node, '{name}', False)"


def test_declared_or_earlier_freezing_agrees() -> None:
    sch = slapo.create_schedule(Net())
    sch["fc1"].apply(Freeze("weight", says_so=True))
    assert slapo.verify(sch, torch.randn(5, 6)).notes == (
        "set by the schedule, in both models: fc1.weight (frozen)",
        ONE_SAMPLE,
    )
    model = Net()
    model.fc2.requires_grad_(False)
    sch = slapo.create_schedule(model)
    sch["fc1"].checkpoint()
    sch["fc2"].replace(lambda old: nn.Linear(8, 6))
    assert slapo.verify(sch, torch.randn(5, 6)).notes == (ONE_SAMPLE,)


def test_freezing_after_the_schedule_names_the_place_to_do_it(message: Messages) -> None:
    sch = slapo.create_schedule(Net())
    sch["fc1"].apply(Unfreeze("another object"))  # from here on the reference model has a parameter of its own
    sch.model.get_parameter("fc1.weight").requires_grad_(False)
    error = failure(sch)
    message(error, "gradient of fc1.weight", "frozen after the schedule")
    assert error.steps == ()
    assert error.hint == "freeze it before create_schedule: model.get_parameter('fc1.weight').requires_grad_(False)"


@dataclass(frozen=True)
class Unfreeze(slapo.Primitive):
    """Train a parameter, and say so or not; in one of the ways below."""

    name = "state.unfreeze"
    equivalence = slapo.Equivalence.EXACT
    way: str

    def apply(self, node: Node, edit: Edit) -> None:
        weight = node.parameters["weight"]
        if self.way == "said":
            edit.set_requires_grad(node, "weight", True)
        elif self.way == "the same object":
            node.module.requires_grad_(True)
            edit.annotate(node, "weight", "note", "nothing else")
        else:
            edit.set_parameter(node, "weight", nn.Parameter(weight.detach().clone()))


def unfreezing(old: nn.Module) -> nn.Module:
    new = nn.Linear(2, 2)
    new.weight, new.bias = old.weight, old.bias
    new.weight.requires_grad_(True)
    return new


def partly_frozen() -> Net:
    torch.manual_seed(0)
    model = Net()
    model.fc1.requires_grad_(False)
    model.unused.requires_grad_(False)
    return model


@pytest.mark.parametrize("path", ["fc1", "unused"])
@pytest.mark.parametrize("way", ["the same object", "another object"])
def test_undeclared_unfreezing_is_found_and_blamed(path: str, way: str, message: Messages) -> None:
    sch = slapo.create_schedule(partly_frozen())
    sch["fc2"].checkpoint()
    sch[path].apply(Unfreeze(way))
    error = failure(sch)
    message(error, f"parameter {path}.weight", "frozen in the reference model")
    assert error.steps == (f"#2 unfreeze('{way}') at '{path}'",)
    assert error.hint == "edit.set_requires_grad(node, 'weight', True)"


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [None, {"tp": 2}])
def test_a_replacement_that_unfreezes_is_found_in_this_process_and_in_others(mesh: dict[str, int] | None) -> None:
    sch = slapo.create_schedule(partly_frozen(), mesh=mesh)
    sch["fc2"].checkpoint()
    sch["unused"].replace(unfreezing)
    error = failure(sch)
    assert (error.tensor, error.path) == ("unused.weight", "unused")
    (step,) = error.steps
    assert step.startswith("#2 replace(")


def test_declared_or_user_unfreezing_agrees() -> None:
    sch = slapo.create_schedule(partly_frozen())
    sch["fc1"].apply(Unfreeze("said"))
    sch["fc2"].replace(lambda old: nn.Linear(8, 6))
    report = slapo.verify(sch, torch.randn(5, 6))
    assert [note for note in report.notes if "set by the schedule" in note] == [
        "set by the schedule, in both models: fc1.weight (trained)"
    ]
    model = partly_frozen()
    sch = slapo.create_schedule(model)
    sch["fc2"].checkpoint()
    model.fc1.requires_grad_(True)  # between the steps, and by no step
    assert slapo.verify(sch, torch.randn(5, 6)).notes == (ONE_SAMPLE,)
    sch = slapo.create_schedule(partly_frozen())  # a fresh module takes the place, the tensors stay
    sch["fc1"].replace(lambda old: nn.Linear(6, 8))
    assert slapo.verify(sch, torch.randn(5, 6)).notes == (ONE_SAMPLE,)
