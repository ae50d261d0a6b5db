"""How the sizes of what passes between stages depend on the number of samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slapo_core import Schedule
from slapo_core.spec.pipeline import Partition
from slapo_pipeline.partition.symbolic import with_symbolic_shapes

from .staging import cut_schedule


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any, only: Any = None) -> Any:
        if only is not None and x.shape[0] != only:
            raise ValueError("another number of samples")
        heads = x.exp().reshape(x.shape[0] * 2, 2)
        padded = torch.cat([x, x[:1]])
        square = (x @ x.T).flatten()
        table = x.sum(0).exp()
        y = self.a(x)
        return self.b(y) + heads.sum() + padded.sum() + square.sum() + table


def shapes(schedule: Schedule, inputs: dict[str, Any], axes: Any = None) -> dict[str, Any]:
    def ask(other: Any) -> Partition | None:
        answer = schedule.hooks.single("slapo_partition", schedule=schedule, inputs=other, batch_axes=axes or {})
        return None if answer is None else answer[1]

    first = ask(inputs)
    assert first is not None
    values = with_symbolic_shapes(first, inputs, axes or {}, ask).values
    return {
        name: None if value.symbolic_shape is None else tuple(map(str, value.symbolic_shape))
        for name, value in values.items()
        if value.consumers
    }


def test_sizes_by_the_number_of_samples() -> None:
    schedule = cut_schedule(Model(), ["a"])
    found = shapes(schedule, {"x": torch.rand(3, 4)})
    assert found == {
        "a": ("batch", "4"),
        "reshape": ("2*batch", "2"),
        "cat": ("batch+1", "4"),
        "flatten": None,  # the square of it
        "exp_1": ("4",),
    }


def test_nothing_is_said_where_other_batches_go_another_way() -> None:
    schedule = cut_schedule(Model(), ["a"])
    assert set(shapes(schedule, {"x": torch.rand(3, 4), "only": 3}).values()) == {None}
    unknown = shapes(schedule, {"x": torch.rand(3, 4)}, {"x": None})
    assert set(unknown.values()) == {None}, "no input counts samples"
