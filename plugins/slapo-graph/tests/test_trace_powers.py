"""``x ** 2`` and ``x **= 2``: torch gives their functions the names of what they call, and not their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import slapo_core as slapo
from slapo_graph.tracing.targets import _OPERATORS, target_of, writes_to_first


class Powers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(x) ** 2 + 2**x
        same = hidden[:2]
        hidden **= 2
        return hidden.sum() + same.sum()


def test_powers_are_recorded_as_written() -> None:
    model, x = Powers(), torch.randn(3, 3)
    expected = model(x)
    sch = slapo.create_schedule(model, example_inputs=x)
    sch.root.trace()
    assert torch.equal(model(x), expected)
    assert " ** 2" in str(sch.root.graph)
    assert "**= 2" in str(sch.root.graph)
    slapo.verify(sch, x)


def test_every_operator_of_tensors_is_known_by_the_function_that_torch_calls() -> None:
    for name, operation in _OPERATORS.items():
        func: Any = getattr(torch.Tensor, name, None)
        if func is not None:
            kind, target, _ = target_of(func, AssertionError)
            assert (kind, target) == ("function", operation) or kind == "method", name
            assert writes_to_first(func) is (name.startswith("__i") and name != "__invert__"), name
