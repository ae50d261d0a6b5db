"""Define the cases of ``slapo plugins check``: full and sharded optimizer state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slapo_testing import DialectCase

_REJECTS: list[dict[str, Any]] = [
    {"optimizer_config": {"learning_rate": 0.1}},
    {"ddp_config": {"overlap": True}},
    {"model_parallel_config": {"tensor_model_parallel_size": 64}},
    {"microbatches": 0},
    {"optimizer_cfg": {}},
]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make AdamW with a large eps: gradients that are rounding errors of zero must not become steps."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def slapo_cases() -> list[DialectCase]:
    """Return the cases, in float32, in which Megatron sums gradients; they need CUDA."""
    why = None if torch.cuda.is_available() else "Megatron-core runs on CUDA, and this machine has none"
    return [_case(False, why), _case(True, why)]


def _case(distributed: bool, unavailable: str | None) -> DialectCase:
    return DialectCase(
        "megatron",
        config={"ddp_config": {"use_distributed_optimizer": distributed}},
        rejects=_REJECTS,
        optimizers=(adamw,) if distributed else (sgd, adamw),  # the distributed one steps AdamW only
        dtype=torch.float32,
        device="cuda" if unavailable is None else "cpu",
        device_per_rank=True,
        needs_process_group=True,
        unavailable=unavailable,
        name="distributed-optimizer" if distributed else "plain",
    )
