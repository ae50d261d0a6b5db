"""Settings that pass through change how DeepSpeed works, and not what it trains: on two replicas, in one launch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from tests.messages import Messages

preload_modules("deepspeed", "slapo_deepspeed.dialect")

STEPS = 3


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


OWN = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.0}}}
ROOMY = {"reduce_scatter": False, "round_robin_gradients": True}
CASES: dict[str, dict[str, Any]] = {
    "scaled before": {**zero(1), "prescale_gradients": True, "gradient_predivide_factor": 3.0},
    "scaled before, ZeRO-2": {**zero(2, **ROOMY), "prescale_gradients": True},
    "accumulated in fp32": {**zero(1), "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
    "small buckets": zero(2, overlap_comm=True, contiguous_gradients=False, reduce_bucket_size=10),
    "offloaded": zero(2, offload_optimizer={"device": "cpu"}),
    "offloaded, ZeRO-3": zero(3, offload_param={"device": "cpu"}, stage3_param_persistence_threshold=0),
    "measured": {**zero(0), "wall_clock_breakdown": True, "steps_per_print": 2},
    "its own optimizer": {**zero(1), **OWN},
}


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.0)


def _train(target: str, *, norm: float | None = 0.05, scale: float = 1.0, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    schedule = slapo.create_schedule(model, mesh={"dp": 2})
    assert schedule.mesh is not None
    has_own = "optimizer" in (options.get("config") or {})
    engine = slapo.build(
        schedule,
        target=target,
        optimizer=None if has_own else _adamw,
        loss=lambda output, batch: scale * output.square().mean(),
        max_grad_norm=norm,
        accumulate=2,
        **options,
    )
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + schedule.mesh.rank("dp"))
        result = engine.train_step(torch.randn(4, 8, generator=generator))
        assert (result.grad_norm is None) == (norm is None)
        found += [float(result.loss), 0.0 if result.grad_norm is None else float(result.grad_norm)]
    found += [float(value.sum()) for value in engine.state_dict().values()]
    engine.close()
    return found


def _differing() -> dict[str, str]:
    """What ranks are told that differ in what they say, in what it decides, and in an argument of ``build``."""
    rank = dist.get_rank()
    said: dict[str, dict[str, Any]] = {
        "nothing decided": {"config": {**zero(0), **({"gradient_accumulation_steps": 2} if rank else {})}},
        "a key": {"config": zero(rank)},
        "an argument": {"norm": 0.05 + rank},
        "norms": {"norm": None if rank else 0.05, "config": {"gradient_clipping": 0.05} if rank else {}},
    }
    found = {}
    for name, options in said.items():
        try:
            _train("deepspeed", **options)
        except slapo.RankMismatchError as error:
            found[name] = error.message
    return found


def _all() -> tuple[Any, ...]:
    scheduled = {**zero(1), **OWN, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}}
    return (
        _train("torch"),
        {name: _train("deepspeed", config=config) for name, config in CASES.items()},
        _train("deepspeed", config=scheduled),
        [_train(target, norm=None, scale=100.0) for target in ("torch", "deepspeed")],
        _differing(),
    )


@functools.cache
def _found() -> list[Any]:
    return run_ranks(_all, world_size=2)


@pytest.mark.ranks
def test_settings_that_pass_train_what_target_torch_trains() -> None:
    for expected, found, scheduled, (unclipped, by_deepspeed), _ in _found():
        # Their norms are far above 1.0, to which DeepSpeed clips by default.
        assert by_deepspeed == pytest.approx(unclipped, rel=1e-5, abs=1e-5)
        for name, got in found.items():
            assert got == pytest.approx(expected, abs=1e-5), name
        assert scheduled[:2] == pytest.approx(expected[:2], abs=1e-5)
        assert scheduled[2:] != pytest.approx(expected[2:], abs=1e-5)  # the learning rate grows slowly


@pytest.mark.ranks
def test_ranks_may_differ_in_spelling_and_not_in_the_completed_configuration(message: Messages) -> None:
    first, second = (found for *_, found in _found())
    assert first == second
    assert list(first) == ["a key", "an argument", "norms"]
    message(first["a key"], "'config'", "zero_optimization.stage", "rank 0: 0\n  rank 1: 1")
    message(first["an argument"], "max_grad_norm", "rank 0: 0.05\n  rank 1: 1.05")
    message(first["norms"], "max_grad_norm", "rank 0: 0.05\n  rank 1: None")
