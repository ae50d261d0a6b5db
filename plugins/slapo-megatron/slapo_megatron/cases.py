"""Define the cases of ``slapo plugins check``: with full and with sharded optimizer state."""

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
    """With an eps that keeps gradients that are zero but for rounding from becoming steps."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def slapo_cases() -> list[DialectCase]:
    """Megatron sums gradients in float32: the kit's tolerance for that. It runs on CUDA alone."""
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
