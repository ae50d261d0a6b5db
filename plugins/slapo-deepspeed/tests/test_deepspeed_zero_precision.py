"""Lower precision, offloading and schedules of the learning rate, against the same training written by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slapo_testing import preload_modules, run_ranks
from tests.processor import Outcome, run_case

from . import small

preload_modules("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3")
pytestmark = pytest.mark.ranks

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 16}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
OFFLOADED = {"device": "cpu"}
WARMUP = {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}
SETTINGS = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.5}


def decaying(parameters: Any) -> torch.optim.Optimizer:
    """So that a step too many would be seen."""
    return torch.optim.AdamW(parameters, **SETTINGS)


def zero(stage: int, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    # DeepSpeed's own product rounds twice in lower precision.
    own: dict[str, Any] = {"memory_efficient_linear": False} if stage == 3 else {}
    return {**config, "zero_optimization": {"stage": stage, **own, **more}}


OWN = {"optimizer": {"type": "AdamW", "params": {**SETTINGS, "torch_adam": True}}}
# What is trained by, what by hand, and the difference that is allowed after the steps.
CASES: dict[str, tuple[dict[str, Any], str, float]] = {
    "bf16, ZeRO-1, its own optimizer": (zero(1, {**BF16, **OWN}), "bf16", 1e-6),
    "bf16, ZeRO-1, sums in fp32": (zero(1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}), "bf16", 1e-6),
    "bf16, ZeRO-2": (zero(2, BF16), "bf16", 1e-6),
    "bf16, ZeRO-3": (zero(3, BF16), "bf16", 1e-6),
    "fp16, ZeRO-1": (zero(1, FP16), "fp16", 1e-4),
    "fp16, ZeRO-3": (zero(3, FP16), "fp16", 1e-4),
    "autocast": (zero(0, AUTOCAST), "autocast", 1e-6),
    "autocast, ZeRO-2": (zero(2, AUTOCAST), "autocast", 1e-4),
    "offloaded, ZeRO-2": (zero(2, {"zero_force_ds_cpu_optimizer": False}, offload_optimizer=OFFLOADED), "plain", 1e-6),
    "offloaded, ZeRO-3": (
        zero(3, {"zero_force_ds_cpu_optimizer": False}, offload_optimizer=OFFLOADED, offload_param=OFFLOADED),
        "plain",
        1e-6,
    ),
    "warmed up, ZeRO-1": (zero(1, {"scheduler": {"type": "WarmupLR", "params": WARMUP}}), "warmed up", 1e-6),
}
STEPS = 4


SCALED_TOO_FAR = zero(1, {"fp16": {"enabled": True, "initial_scale_power": 30}})


def _trained(config: dict[str, Any]) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    factory = None if "optimizer" in config else decaying
    _, engine = small.built({"dp": 2}, config, optimizer=factory, max_grad_norm=small.CLIP)
    losses = [float(engine.train_step(small.batch(0)).loss) for _ in range(STEPS)]
    found = (losses, float(engine.eval_step(small.batch(1)).loss), engine.state_dict())
    engine.close()
    return found


def _overflowing() -> tuple[float, int, dict[str, torch.Tensor]]:
    _, engine = small.built({"dp": 2}, SCALED_TOO_FAR, max_grad_norm=small.CLIP)
    first = engine.train_step(small.batch(0))
    found = (float(first.grad_norm), engine.deepspeed.skipped_steps, engine.state_dict())
    engine.close()
    return found


def _on_ranks() -> dict[str, Outcome[Any]]:
    torch.set_num_threads(1)
    found = {name: run_case(config, _trained, config) for name, (config, _, _) in CASES.items()}
    return {**found, "overflow": run_case(SCALED_TOO_FAR, _overflowing)}


@functools.cache
def _found() -> list[dict[str, Outcome[Any]]]:
    return run_ranks(_on_ranks, world_size=2)


def _by_hand(way: str) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(way, torch.float32)
    model = small.make().to(dtype)
    parameters = list(model.parameters())
    masters = [nn.Parameter(one.detach().float()) for one in parameters]
    optimizer, losses = decaying(masters), []
    autocast: Callable[[], Any] = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=way == "autocast")
    for step in range(STEPS):
        if way == "warmed up":
            optimizer.param_groups[0]["lr"] = 1e-2 * max(step - 1, 0) / 4
        with autocast():
            loss = model(**small.batch(0))
        loss.backward()
        losses.append(float(loss.detach()))
        for parameter, master in zip(parameters, masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(masters, small.CLIP)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    with torch.no_grad(), autocast():
        evaluated = float(model.eval()(**small.batch(1)))
    names = [name for name, _ in model.named_parameters()]
    return losses, evaluated, {name: one.detach() for name, one in zip(names, masters, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_training_equals_a_hand_written_loop(name: str) -> None:
    _, way, allowed = CASES[name]
    ranks = [rank[name].get() for rank in _found()]
    losses, evaluated, masters = _by_hand(way)
    for found, found_evaluated, state in ranks:
        close = 1e-5 if allowed < 1e-5 else 2e-3  # else a rounding more or less of a loss in lower precision
        assert found == pytest.approx(losses, rel=close)
        assert found_evaluated == pytest.approx(evaluated, rel=close)
        for key, master in masters.items():
            assert state[key].dtype == torch.float32
            torch.testing.assert_close(
                state[key], master, rtol=0, atol=allowed, msg=lambda text, key=key: f"{key}: {text}"
            )


def test_a_step_that_overflows_is_skipped_and_has_an_infinite_norm() -> None:
    for rank in _found():
        norm, skipped, state = rank["overflow"].get()
        assert norm == float("inf")
        assert skipped == 1
        for name, value in small.make().state_dict().items():
            assert torch.equal(state[name], value.half().float())
