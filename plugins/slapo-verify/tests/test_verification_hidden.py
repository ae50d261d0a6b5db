"""Mistakes that the conditions of a run hide: gradients switched off, none at all, a search that is cut short."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core import Node
from slapo_core.internals import Edit
from tests.messages import Messages

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class _Doubled(torch.autograd.Function):
    """Right forward, doubled backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class WrongBackward(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Doubled.apply(self.inner(x))
        return out


@dataclass(frozen=True)
class WrapWrong(slapo.Primitive):
    """Double what goes back.

    rewrite: f(x) -> doubled(f(x))
    """

    name = "hidden.wrap"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: Node, edit: Edit) -> None:
        edit.wrap_forward(node, lambda forward: lambda *args, **kwargs: _Doubled.apply(forward(*args, **kwargs)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_a_wrong_backward_is_found_where_gradients_are_switched_off(mode: Any) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)))
    sch["1"].apply(WrapWrong())
    with mode(), pytest.raises(slapo.VerifyError) as error:
        slapo.verify(sch, X)
    assert error.value.tensor == "gradient of 1.bias"


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).detach()


def test_trained_parameters_without_a_gradient_are_an_error(message: Messages) -> None:
    model = Detached()
    sch = slapo.create_schedule(model)
    with pytest.raises(slapo.ArgumentError) as error:
        slapo.verify(sch, X)
    message(error, "requires grad", "linear.weight")
    model.requires_grad_(False)
    report = slapo.verify(sch, X)
    assert {entry.kind: entry.compared for entry in report.largest}["gradient"] == 0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.rest = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.q(x) * self.k(x) + self.rest(x)
        return out


@dataclass(frozen=True)
class Detach(slapo.Primitive):
    """Let no gradient pass.

    rewrite: f(x) -> detached(f(x))
    """

    name = "hidden.detach"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: Node, edit: Edit) -> None:
        edit.wrap_forward(node, lambda forward: lambda *args: forward(*args).detach())


def test_a_merged_parameter_that_lost_its_gradient_is_reported() -> None:
    sch = slapo.create_schedule(Attention(), example_inputs=X)
    sch.root.trace()
    sch.root.merge(("q", "k"), name="qk")
    sch["qk"].apply(Detach())
    with pytest.raises(slapo.VerifyError) as error:
        slapo.verify(sch, X, optimizer_steps=0)
    assert error.value.tensor in ("gradient of k.bias", "gradient of q.bias", "gradient of k.weight")


def test_a_search_that_takes_too_long_ends_with_the_nearest_steps(message: Messages) -> None:
    sch = slapo.create_schedule(nn.Sequential(*(nn.Linear(6, 6) for _ in range(8))))
    for number in range(8):
        sch[str(number)].apply(WrapWrong())
    with pytest.raises(slapo.VerifyError) as error:
        slapo.verify(sch, X, blame_seconds=0.0)
    assert "search stopped" in str(error.value)
    assert 0 < len(error.value.steps) <= 3
    with pytest.raises(slapo.VerifyError) as error:
        slapo.verify(sch, X, blame_seconds=None)
    assert "search stopped" not in str(error.value)
