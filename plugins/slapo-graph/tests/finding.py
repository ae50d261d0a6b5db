"""Traced modules to find patterns in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import slapo_core as slapo

__all__ = ["Block", "Computes", "found", "nearest_miss", "total", "traced"]


class Computes(nn.Module):
    """A module whose forward is a function.

    Args:
        function: takes the inputs, and before them the modules given by name, as keyword arguments.
        modules: that it calls.
    """

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function, self.names = function, tuple(modules)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs, **{name: getattr(self, name) for name in self.names})


class Block(nn.Module):
    """A projection, dropout, residual and norm."""

    def __init__(self, width: int = 4, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=epsilon)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normalized: torch.Tensor = self.norm(self.dropout(self.dense(x)) + residual)
        return normalized


def traced(module: Any, *inputs: Any, **modules: nn.Module) -> slapo.Schedule:
    """The schedule of a traced module, or of one that computes a function.

    Args:
        module: or a function of ``inputs``.
        inputs: of the module.
        modules: that the function calls.
    """
    if not isinstance(module, nn.Module):
        module = Computes(module, **modules)
    schedule = slapo.create_schedule(module, example_inputs=inputs)
    schedule.trace()
    return schedule


def found(schedule: slapo.Schedule, pattern: Any) -> list[tuple[str, ...]]:
    """The names of the nodes of every match."""
    return [match.nodes for match in schedule.find(pattern)]


def total(pattern: Any, module: Any, *inputs: Any, **modules: nn.Module) -> int:
    """How many matches there are."""
    return len(traced(module, *inputs, **modules).find(pattern))


def nearest_miss(schedule: slapo.Schedule, pattern: Any) -> str | None:
    """What the error of a primitive shows where the pattern has no match."""
    from slapo_graph.patterns.definition import pattern_of
    from slapo_graph.primitives.find import first_graph

    assert not schedule.find(pattern)
    root: Any = schedule.root
    return pattern_of(pattern).nearest_miss(first_graph(root), root.module)
