"""Steps are blamed for the failure that is reported, and for no other that they have of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core import Node
from slapo_core.internals import Edit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(6, 6), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.fc(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layer:
            x = block(x)
        return x


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, raises: bool) -> torch.Tensor:
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.raises:
            raise TypeError("no backward here")
        return grad * 1.001, None


@dataclass(frozen=True)
class Wrap(slapo.Primitive):
    """Wrap the forward in one of the mistakes below."""

    name = "blame.wrap"
    equivalence = slapo.Equivalence.EXACT
    mistake: str

    def apply(self, node: Node, edit: Edit) -> None:
        edit.wrap_forward(node, _MISTAKES[self.mistake])


def _raises(forward: Any) -> Any:
    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no forward here")

    return run


_MISTAKES: dict[str, Any] = {
    "fine": lambda forward: lambda module, x: forward(module, x),
    "output": lambda forward: lambda module, x: forward(module, x) * 1.01,
    "gradient": lambda forward: lambda module, x: _InBackward.apply(forward(module, x), False),
    "raises": _raises,
    "raises in backward": lambda forward: lambda module, x: _InBackward.apply(forward(module, x), True),
}


def blame(*mistakes: str) -> slapo.VerifyError:
    """One mistake in each layer, beside three steps that are right."""
    torch.manual_seed(0)
    sch = slapo.create_schedule(Net())
    for index, mistake in enumerate(mistakes):
        sch[f"layer.{index}.fc"].apply(Wrap("fine"))
        sch[f"layer.{index}.act"].apply(Wrap(mistake))
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(sch, torch.randn(5, 6))
    return caught.value


def test_a_step_with_another_failure_is_not_blamed_for_the_first_tensor_that_differs() -> None:
    error = blame("gradient", "fine", "output", "fine")
    assert error.tensor == "output"
    assert error.steps == ("#6 wrap('output') at 'layer.2.act'",)
    assert "likewise" not in error.message


def test_a_step_that_raises_elsewhere_is_not_blamed_for_an_exception() -> None:
    error = blame("raises in backward", "fine", "raises", "fine")
    assert ": ValueError: no forward here (" in error.message.splitlines()[0]
    assert error.steps == ("#6 wrap('raises') at 'layer.2.act'",)
    assert "likewise" not in error.message


def test_an_exception_is_not_blamed_on_a_step_that_gives_other_numbers() -> None:
    error = blame("output", "raises in backward", "fine", "fine")
    assert ": TypeError: no backward here (" in error.message.splitlines()[0]
    assert error.steps == ("#4 wrap('raises in backward') at 'layer.1.act'",)


def test_repeated_blocks_with_the_same_mistake_are_named_with_the_first() -> None:
    error = blame("gradient", "fine", "gradient", "gradient")
    assert error.tensor == "gradient of layer.3.fc.bias"
    assert error.steps == ("#2 wrap('gradient') at 'layer.0.act'",)
    assert error.message.splitlines()[-1] == "  and likewise at 'layer.{2-3}'"
