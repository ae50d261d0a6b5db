"""bf16 and fp16 with main parameters of float32, against the same loop written by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import run_ranks
from tests.support import tied_model

pytestmark = pytest.mark.ranks

SETTINGS = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.5}
STEPS = 4
DISTRIBUTED = {"use_distributed_optimizer": True}
IN_FLOAT = {"grad_reduce_in_fp32": True}
OWN = {"lr": 1e-2, "adam_eps": 1e-4, "weight_decay": 0.5}
OVERLAPPED = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 60}


def decaying(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **SETTINGS)


def ruled(parameters: Any) -> torch.optim.Optimizer:
    """Megatron's rule: what has one axis is not decayed."""
    groups = [
        {"params": [one for one in parameters if one.dim() != 1]},
        {"params": [one for one in parameters if one.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **SETTINGS)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Any]] = {
    "bf16": ("bf16", IN_FLOAT, {}, decaying),
    "bf16, sums in bf16": ("bf16", {"grad_reduce_in_fp32": False}, {}, decaying),
    "bf16, Megatron's Adam": ("bf16", IN_FLOAT, OWN, None),
    "bf16, distributed": ("bf16", {**IN_FLOAT, **DISTRIBUTED}, DISTRIBUTED, decaying),
    "bf16, distributed, overlapped": (
        "bf16",
        {**IN_FLOAT, **OVERLAPPED},
        {**DISTRIBUTED, "overlap_param_gather": True},
        decaying,
    ),
    "bf16, Megatron's Adam, distributed": ("bf16", {**IN_FLOAT, **DISTRIBUTED}, {**OWN, **DISTRIBUTED}, None),
    "fp16": ("fp16", IN_FLOAT, {"loss_scale": 16.0}, decaying),
    "fp16, distributed": ("fp16", {**IN_FLOAT, **DISTRIBUTED}, {**DISTRIBUTED, "loss_scale": 16.0}, decaying),
}
"""Precision, options of the wrapper, options of the optimizer, and the factory."""


def options_of(precision: str, ddp: dict[str, Any], optimizer: dict[str, Any], factory: Any) -> dict[str, Any]:
    return {
        "ddp_config": ddp,
        "optimizer_config": {precision: True, **optimizer},
        "model_parallel_config": {precision: True},
        "optimizer": factory,
        "max_grad_norm": tied_model.CLIP,
    }


def on_rank() -> dict[str, Any]:
    from tests.support.cpu_megatron import install

    install()
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        _, engine = tied_model.built({"dp": 2}, target="megatron", **options_of(*case))
        results = [engine.train_step(tied_model.batch(0)) for _ in range(STEPS)]
        evaluated = engine.eval_step(tied_model.batch(1)).loss
        kinds = {results[0].loss.dtype, evaluated.dtype}
        found[name] = [float(one.loss) for one in results], float(evaluated), engine.state_dict(), kinds
        engine.close()
    found["overflow"] = overflowing()
    found["inputs"] = inputs()
    return found


def overflowing() -> dict[str, Any]:
    options = options_of("fp16", {}, {**OWN, "initial_loss_scale": 2.0**40, "hysteresis": 1}, None)
    options["scheduler"] = {"lr_decay_style": "linear", "lr_decay_steps": 10}
    _, engine = tied_model.built({"dp": 2}, target="megatron", **options)
    result = engine.train_step(tied_model.batch(0))
    megatron = engine.megatron
    told = {
        "norm": float(result.grad_norm),
        "loss": float(result.loss),
        "scale": float(megatron.optimizer.get_loss_scale()),
        "steps": megatron.scheduler.num_steps,
        "state": engine.state_dict(),
    }
    for _ in range(40):
        result = engine.train_step(tied_model.batch(0))
        if torch.isfinite(result.grad_norm):
            break
    told["later"] = float(result.grad_norm), megatron.scheduler.num_steps
    engine.close()
    return told


class Nested(nn.Module):
    """Floats in a nested input, and a number of them that must not be cast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(4, 1)
        self.kinds: list[str] = []

    def forward(self, given: dict[str, Any], *, scale: torch.Tensor, number: float) -> dict[str, Any]:
        x, which = given["x"][0], given["which"]
        self.kinds = [str(one.dtype) for one in (x, which, scale)] + [type(number).__name__]
        y = self.weight(x[which]) * scale
        return {"logits": y, "kept": [which]}


def loss_of(output: dict[str, Any], batch: Any) -> torch.Tensor:
    assert output["logits"].dtype == torch.float32
    return (output["logits"].mean() - batch["scale"] * 1e-3) ** 2


def inputs() -> list[str]:
    sch = slapo.create_schedule(Nested(), mesh={"dp": 2})
    options = options_of("bf16", {}, {}, decaying)
    engine = slapo.build(sch, target="megatron", loss=loss_of, **options)
    batch = {
        "given": {"x": [torch.randn(3, 4)], "which": torch.tensor([0, 2])},
        "scale": torch.tensor(2.0),
        "number": 0.5,
    }
    result = engine.train_step(batch)
    kinds = [*sch.root.module.kinds, str(result.loss.dtype), str(result.output["logits"].dtype)]
    engine.close()
    return kinds


@functools.cache
def found() -> list[dict[str, Any]]:
    return run_ranks(on_rank, world_size=2)


@functools.cache
def by_hand(way: str, *, is_ruled: bool) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Two replicas with the same samples have the gradients of one."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[way]
    model = tied_model.make().to(dtype)
    parameters = list(model.parameters())
    masters = [nn.Parameter(one.detach().float()) for one in parameters]
    optimizer, losses = (ruled if is_ruled else decaying)(masters), []
    for _ in range(STEPS):
        loss = model(**tied_model.batch(0)).float()
        scale = 16 if way == "fp16" else 1
        (loss * scale).backward()
        losses.append(float(loss.detach()))
        for parameter, master in zip(parameters, masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float() / scale, None
        nn.utils.clip_grad_norm_(masters, tied_model.CLIP)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    with torch.no_grad():
        evaluated = float(model.eval()(**tied_model.batch(1)))
    names = [name for name, _ in model.named_parameters()]
    return losses, evaluated, {name: one.detach() for name, one in zip(names, masters, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_training_equals_a_hand_written_loop(name: str) -> None:
    way, _, _, factory = CASES[name]
    losses, evaluated, masters = by_hand(way, is_ruled=factory is None)
    for rank in found():
        steps, found_evaluated, state, kinds = rank[name]
        assert kinds == {torch.float32}
        assert steps == pytest.approx(losses, rel=1e-5)
        assert found_evaluated == pytest.approx(evaluated, rel=1e-5)
        for key, master in masters.items():
            assert state[key].dtype == torch.float32
            torch.testing.assert_close(state[key], master, rtol=0, atol=2e-6)


def test_a_step_that_overflows_is_skipped_and_has_an_infinite_norm() -> None:
    for rank in found():
        told = rank["overflow"]
        assert told["norm"] == float("inf")
        assert told["loss"] == pytest.approx(float(tied_model.make()(**tied_model.batch(0)).detach()), rel=1e-2)
        assert told["scale"] == 2.0**39
        assert told["steps"] == 0
        for name, value in tied_model.make().state_dict().items():
            assert torch.equal(told["state"][name], value.half().float())
        assert told["later"][1] == 1
        assert told["later"][0] < 100


def test_float_inputs_are_cast_to_the_models_precision_and_outputs_to_float32() -> None:
    for rank in found():
        low, full = "torch.bfloat16", "torch.float32"
        assert rank["inputs"] == [low, "torch.int64", low, "float", full, full]
