"""What is refused because DeepSpeed trains it wrongly: with the refusals off, weights differ from target torch's."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks

pytestmark = pytest.mark.ranks
preload_modules("deepspeed", "slapo_deepspeed.dialect")

BF16 = {"bf16": {"enabled": True}}
ZERO_0 = {"zero_optimization": {"stage": 0}}
CASES: dict[str, dict[str, Any]] = {
    "sum": {**ZERO_0, "gradient_allreduce_op": "sum"},
    "unmanaged": {**ZERO_0, "managed_gradient_accumulation": False},
    "bf16 without ZeRO": {**BF16, **ZERO_0},
}
ALLOWED: dict[str, dict[str, Any]] = {
    "sum": {**ZERO_0, "gradient_allreduce_op": "mean"},
    "unmanaged": {**ZERO_0, "managed_gradient_accumulation": True},
    "bf16 without ZeRO": {**BF16, "zero_optimization": {"stage": 1}},
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, weight_decay=0.5)


def loss_of(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def trained(target: str, config: dict[str, Any]) -> torch.Tensor:
    """The weights after two steps, as the forward has them."""
    torch.manual_seed(0)
    is_low = "bf16" in config
    model = nn.Linear(8, 4)
    engine = slapo.build(
        slapo.create_schedule(model, mesh={"dp": 2}),
        target=target,
        optimizer=sgd,
        loss=loss_of,
        accumulate=2,
        **({"config": config} if target == "deepspeed" else {}),
    )
    for step in range(2):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        engine.train_step(batch.bfloat16() if is_low and target == "deepspeed" else batch)
    weight = engine.module.weight.detach().float().clone()
    engine.close()
    return weight


def on_rank() -> dict[str, tuple[float, float]]:
    """How far the weights are from target torch's: as the target allows it, and with the refusals off."""
    torch.set_num_threads(1)
    wanted, found = trained("torch", {}), {}
    for name, config in CASES.items():
        right = trained("deepspeed", ALLOWED[name])
        with mock.patch("slapo_deepspeed.config.DANGERS", ()):
            wrong = trained("deepspeed", config)
        found[name] = tuple(float((one - wanted).abs().max()) for one in (right, wrong))
    return found


@functools.cache
def differences() -> list[dict[str, tuple[float, float]]]:
    return run_ranks(on_rank, world_size=2)


@pytest.mark.parametrize("name", CASES)
def test_refused_settings_would_train_silently_wrong(name: str) -> None:
    for rank in differences():
        right, wrong = rank[name]
        assert right < (5e-3 if name.startswith("bf16") else 1e-6)
        assert wrong > 2e-2
