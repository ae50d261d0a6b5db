"""What is done to engines of the small model, on two ranks, in one launch; every case gives what it found."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from slapo_deepspeed.state import DeepSpeedOptimizer, DeepSpeedTensors
from tests.integration.dialects.small import build, train
from tests.integration.dialects.states import before_the_first_step, different, low_precision, said
from tests.processor import run_case

__all__ = ["IN_BFLOAT16", "LOW", "all_cases"]

BF16 = {"bf16": {"enabled": True}}
LOW: dict[str, tuple[str, dict[str, Any]]] = {
    "ZeRO-1": ("ZeRO-1 dp2", BF16),
    "ZeRO-1, gradients in float32": ("ZeRO-1 dp2", {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    "ZeRO-2, round robin": (
        "ZeRO-2 dp2",
        {**BF16, "zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    ),
    "ZeRO-3": ("ZeRO-3 dp2", BF16),
    "ZeRO-3, on the CPU": (
        "ZeRO-3 dp2",
        {
            **BF16,
            "zero_optimization": {"stage": 3, "sub_group_size": 200, "offload_optimizer": {"device": "cpu"}},
            "zero_force_ds_cpu_optimizer": False,
        },
    ),
    "ZeRO-3, nothing kept whole": (
        "ZeRO-3 dp2",
        {**BF16, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    ),
}
if not os.environ.get("SLAPO_TEST_WHOLE"):
    LOW = {name: LOW[name] for name in ("ZeRO-1", "ZeRO-3")}
IN_BFLOAT16 = ("ZeRO-1", "ZeRO-3")
"""Of these the reference model is in bfloat16 already."""
SCHEDULER = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": [0.02, 0.01]}}}


def schedulers(directory: Path) -> dict[str, Any]:
    """A warm-up of the learning rate: its place goes with the checkpoint."""

    def rates(engine: Any, first: int, last: int) -> list[float]:
        found = []
        for step in range(first, last):
            train(engine, step, step + 1)
            found.append(engine.deepspeed.get_lr()[0])
        return found

    engine = build("ZeRO-1 dp2", config=SCHEDULER)
    rates(engine, 0, 2)
    engine.save(directory / "warm")
    wanted, counted = rates(engine, 2, 4), engine.deepspeed.global_steps
    again = build("ZeRO-3 dp2", config=SCHEDULER, seed=7)
    told = said(again.load, directory / "warm")
    resumed = rates(again, 2, 4)
    without = said(build("ZeRO-1 dp2").load, directory / "warm")
    elsewhere = build("torch tp2")
    torch_told = said(elsewhere.load, directory / "warm")
    elsewhere.save(directory / "plain")
    cold = said(again.load, directory / "plain")
    return {
        "rates": [wanted, resumed],
        "steps": [counted, again.deepspeed.global_steps],
        "told": [told, without, torch_told, cold],
    }


@contextlib.contextmanager
def masters_left_alone() -> Iterator[None]:
    """A fault: a load that writes what the forward computes with, and not what is trained."""

    def loading(self: Any, live: Any, value: torch.Tensor) -> Any:
        return lambda: live.tensor.data.copy_(value)

    with mock.patch.object(DeepSpeedTensors, "loading", loading):
        yield


@contextlib.contextmanager
def moments_of_another() -> Iterator[None]:
    """A fault: two parameters of one shape get each other's moments."""
    right = DeepSpeedOptimizer.loading

    def loading(self: Any, groups: Any, states: Any) -> Any:
        (one, other, *_) = [
            parameter for parameter in states if tuple(self._storage.of(parameter).main.shape) == (14, 10)
        ]
        return right(self, groups, {**states, one: states[other], other: states[one]})

    with mock.patch.object(DeepSpeedOptimizer, "loading", loading):
        yield


def faults(directory: Path) -> dict[str, Any]:
    """What the comparisons of the other cases say where something is loaded wrongly."""
    engine = build("ZeRO-1 dp2", config=BF16)
    train(engine, 0, 2)
    engine.save(directory)
    train(engine, 2, 4)
    wanted = engine.state_dict()
    found = {}
    for fault in (contextlib.nullcontext, masters_left_alone, moments_of_another):
        other = build("ZeRO-1 dp2", config=BF16, seed=7)
        with fault():
            other.load(directory)
        loaded = said(other.check_replicas)
        train(other, 2, 4)
        found[fault.__name__] = (loaded, len(different(other.state_dict(), wanted)))
    return found


def corrupted() -> dict[str, Any]:
    """Copies that are changed on one rank, or on all of them behind DeepSpeed's back."""
    found: dict[str, Any] = {}
    name = "blocks.0.up.weight"
    for form, ranks in (
        ("ZeRO-0 dp2", (1,)),
        ("ZeRO-1 dp2", (1,)),
        ("ZeRO-1 dp2", (0, 1)),
        ("ZeRO-3 dp2", (0,)),
    ):
        engine = build(form)
        train(engine, 0, 1)
        before = engine.state_dict()
        with torch.no_grad():
            parameter = engine.module.get_parameter(name)
            parameter.data.add_(float(torch.distributed.get_rank() in ranks))
        found[f"{form} on {ranks}"] = [
            said(engine.check_replicas),
            said(engine.check_replicas, repair=True),
            said(engine.check_replicas),
            different(engine.state_dict(), before),
        ]
    engine = build("ZeRO-1 tp2")
    train(engine, 0, 1)
    held = engine._storage._storage.of(engine.module.get_parameter("blocks.0.norm.weight"))
    with torch.no_grad():
        if torch.distributed.get_rank() == 1:
            held.main.of(engine._storage.state_of(held)["exp_avg"]).add_(1.0)
    found["a moment along tp"] = [said(engine.check_replicas), said(engine.check_replicas, repair=True)]
    found["a moment along tp"] += [said(engine.check_replicas), []]
    return found


def own_optimizer(directory: Path) -> dict[str, Any]:
    """DeepSpeed's optimizer by its configuration, and one of torch with the same settings: each loads the other's."""
    params = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.01, "torch_adam": True}
    by_config: dict[str, Any] = {"optimizer": None, "config": {"optimizer": {"type": "AdamW", "params": params}}}
    by_factory: dict[str, Any] = {"optimizer": lambda them: torch.optim.AdamW(them, lr=0.01, eps=1e-4)}
    found = {}
    for form, options, other, others in (
        ("ZeRO-3 dp2", by_config, "torch tp2", by_factory),
        ("torch tp2", by_factory, "ZeRO-1 dp2", by_config),
    ):
        engine = build(form, **options)
        train(engine, 0, 2)
        engine.save(directory / form)
        train(engine, 2, 4)
        again = build(other, seed=7, **others)
        again.load(directory / form)
        train(again, 2, 4)
        one, two = engine.state_dict(), again.state_dict()
        found[form] = [name for name in one if (one[name] - two[name]).abs().max() > 3e-6]
    return found


def steps(directory: Path) -> dict[str, Any]:
    """Parameters that took other numbers of steps than those that lie with them; and one that never took any."""
    engine = build("torch tp2", optimizer=one_group)
    train(engine, 0, 2)
    late = engine.module.get_parameter("blocks.2.norm.weight")
    engine.optimizer.state[late]["step"] += 3
    engine.save(directory / "late")
    del engine.optimizer.state[late]
    engine.save(directory / "never")
    found = {}
    for case in ("late", "never"):
        other = build("ZeRO-1 dp2", optimizer=one_group)
        before = other.state_dict()
        found[case] = (said(other.load, directory / case), different(other.state_dict(), before) == [])
    return found


def one_group(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def ends() -> dict[str, Any]:
    """What an engine says after its end, and one without an optimizer."""
    engine = build("ZeRO-3 dp2")
    train(engine, 0, 1)
    there = engine.optimizer is engine.deepspeed.optimizer
    engine.close()
    engine.close()
    evaluating = build("ZeRO-3 dp2", optimizer=None)
    state = evaluating.state_dict()
    plain = build("ZeRO-0 dp2").state_dict()
    return {
        "optimizer": (there, engine.optimizer, evaluating.optimizer),
        "steps": [said(train, engine, 0, 1), said(train, evaluating, 0, 1)],
        "evaluated": different(state, plain),
    }


def all_cases(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in LOW:
        dtype = torch.bfloat16 if case in IN_BFLOAT16 else torch.float32
        form, config = LOW[case]
        found[case] = run_case(config, low_precision, form, {"config": config}, dtype, directory / case)
    found["schedulers"] = schedulers(directory)
    found["before the first step"] = before_the_first_step(
        ("ZeRO-0 dp2", "ZeRO-1 dp2", "ZeRO-3 dp2"), directory / "fresh"
    )
    found["own optimizer"] = own_optimizer(directory / "own")
    found["steps"] = steps(directory / "steps")
    found["faults"] = run_case(BF16, faults, directory / "faults")
    found["corrupted"] = corrupted()
    found["ends"] = ends()
    return found
