"""Define the cases of ``slapo plugins check``: sharded optimizer state, and sharded weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slapo_testing import DialectCase

_REJECTS: list[dict[str, Any]] = [
    {"config": {"gradient_cliping": 1.0}},
    {"config": {"train_batch_size": "many"}},
    {"config": {"zero_optimization": {"stage": 4}}},
    {"confg": {}},
]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make AdamW with a large eps: gradients that are rounding errors of zero must not become steps."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def slapo_cases() -> list[DialectCase]:
    """Return the cases, in float32, in which DeepSpeed reduces: the kit's tolerance is for that."""
    return [_case(1), _case(3)]


def _case(stage: int) -> DialectCase:
    return DialectCase(
        "deepspeed",
        config={"config": {"zero_optimization": {"stage": stage}}},
        rejects=_REJECTS,
        optimizers=(sgd, adamw),
        dtype=torch.float32,
        device_per_rank=True,
        needs_process_group=True,
        name=f"zero-{stage}",
    )
