"""Kernels launched on addresses are not launched on tensors without memory: that would end a CUDA process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_graph.effects import Effects
from slapo_graph.example_calls import reference_calls
from tests.messages import Messages

from .raw_kernels import ADDRESSES, Block, Copied, by_extension, by_operator, by_python

X = torch.randn(2, 3, 4)
LAUNCHERS = pytest.mark.parametrize("kernel", [by_python, by_extension])


@pytest.fixture(autouse=True)
def _launched_on_memory() -> Iterator[None]:
    ADDRESSES.clear()
    yield
    assert 0 not in ADDRESSES


def schedule(kernel: Callable[..., Any], **options: Any) -> slapo.Schedule:
    return slapo.create_schedule(nn.Sequential(Block(kernel, **options)), example_inputs=X)


@LAUNCHERS
def test_recorded_code_that_launches_one_is_refused(kernel: Callable[..., Any], message: Messages) -> None:
    sch = schedule(kernel)
    with pytest.raises(slapo.TraceError, match="data pointer") as caught:
        sch["0"].trace(flatten=True)
    assert caught.value.path == "0"
    assert caught.value.location is not None
    assert caught.value.location[0].endswith("raw_kernels.py")
    message(caught.value, "leaves='kernel'")
    with pytest.raises(slapo.TraceError, match="data pointer"):
        sch["0.kernel"].trace()


@pytest.mark.parametrize("kernel", [by_python, by_extension, Copied.apply])
@pytest.mark.parametrize("options", [{}, {"flatten": True, "leaves": "kernel"}])
def test_in_a_module_that_stays_a_call_it_runs_as_before(kernel: Callable[..., Any], options: dict[str, Any]) -> None:
    sch = schedule(kernel)
    reference = copy.deepcopy(sch.model)
    sch["0"].trace(**options)
    assert sch["0"].graph is not None
    assert "self.kernel" in str(sch["0"].graph)
    x = torch.randn(5, 3, 4)
    assert torch.equal(sch.model(x), reference(x))


def test_a_custom_function_that_launches_one_is_a_call_with_its_own_backward() -> None:
    sch = schedule(Copied.apply)
    reference = copy.deepcopy(sch.model)
    sch["0"].trace(flatten=True)
    assert "Copied_apply" in str(sch["0"].graph)
    for model in (sch.model, reference):
        model(X).sum().backward()
    for mine, own in zip(sch.model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, own.grad)


@LAUNCHERS
def test_a_variant_first_met_in_a_training_step_is_refused_and_evaluation_goes_on(kernel: Callable[..., Any]) -> None:
    sch = schedule(kernel, only_in_training=True)
    sch.model.eval()
    sch["0"].trace(flatten=True)
    expected = sch.model(X)
    sch.model.train()
    with pytest.raises(slapo.TraceError, match="data pointer"):
        sch.model(X).sum().backward()
    assert torch.equal(sch.model.eval()(X), expected)


def test_a_variant_first_met_in_a_training_step_calls_the_module_with_the_kernel() -> None:
    sch = schedule(Copied.apply, only_in_training=True)
    sch.model.eval()
    sch["0"].trace(flatten=True, leaves="kernel")
    reference = copy.deepcopy(sch.model)
    sch.undo()
    for model in (sch.model.train(), reference.train()):
        model(X).sum().backward()
    for mine, own in zip(sch.model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, own.grad)


@LAUNCHERS
def test_without_values_the_module_that_launches_one_is_named(kernel: Callable[..., Any], message: Messages) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Block(kernel))
    sch = slapo.create_schedule(model)
    with pytest.raises(slapo.TraceError, match="'kernel', which uses the data pointer") as caught:
        sch["0"].trace(flatten=True, leaves="kernel", example_inputs=X.to("meta"))
    message(caught.value, "register_fake")


def test_without_values_an_operator_with_a_fake_implementation_is_recorded() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Block(by_operator))
    sch = slapo.create_schedule(model)
    sch["0"].trace(flatten=True, example_inputs=X.to("meta"))
    reference = nn.Sequential(Block(by_extension))
    model.to_empty(device="cpu").load_state_dict(reference.state_dict())
    x = torch.randn(5, 3, 4)
    assert torch.equal(model(x), reference(x))


@LAUNCHERS
def test_examples_of_modules_behind_one_come_from_a_run_on_values(kernel: Callable[..., Any]) -> None:
    calls, error = reference_calls(nn.Sequential(Block(kernel)), X)
    assert error is None
    (given,), _ = calls["0.second"]
    assert given.shape == (2, 3, 4)
    assert ADDRESSES


@LAUNCHERS
def test_a_replacement_that_launches_one_is_not_refused(kernel: Callable[..., Any]) -> None:
    sch = slapo.create_schedule(nn.Sequential(Activated()), example_inputs=X)
    sch["0"].trace()

    def relu(x: torch.Tensor) -> torch.Tensor:
        return kernel(x).clamp(min=0)

    expected = sch.model(X)
    sch["0"].replace(relu, F.relu)
    assert torch.equal(sch.model(X), expected)


class Activated(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(x))


def effects_of(function: Callable[..., Any]) -> bool:
    """Whether something is known of a rewrite's function, in a model on the meta device."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example"] = ((2, 4), torch.float32)
    node = graph.call_function(function, (x,))
    graph.output(node)
    return not Effects(graph, nn.Linear(4, 4, device="meta")).draws(node)


def test_effects_of_a_function_are_seen_on_the_device_of_the_model() -> None:
    def needs_its_device(x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            raise RuntimeError("a tensor of another device")
        return x.relu()

    needs_its_device.slapo_is_observed = True  # type: ignore[attr-defined]
    assert effects_of(needs_its_device)


@LAUNCHERS
def test_effects_of_a_function_that_launches_one_are_not_known(kernel: Callable[..., Any]) -> None:
    def launches(x: torch.Tensor) -> torch.Tensor:
        return kernel(x)

    launches.slapo_is_observed = True  # type: ignore[attr-defined]
    assert not effects_of(launches)
