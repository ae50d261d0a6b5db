"""What is done to engines of target ``"megatron"``, on two ranks, in one launch; every case gives what it found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from slapo_runtime.correspondence.flat_storage import FlatOptimizer, FlatTensors
from tests.integration.dialects.small import build, train
from tests.integration.dialects.states import before_the_first_step, different, low_precision, said
from tests.tiers import sampled

__all__ = ["LOW", "all_cases"]

BF16 = {"optimizer_config": {"bf16": True, "clip_grad": 0.0}, "model_parallel_config": {"bf16": True}}
SCALED = {"fp16": True, "clip_grad": 0.0, "initial_loss_scale": 2.0**24, "loss_scale_window": 2, "hysteresis": 1}
FP16 = {"optimizer_config": SCALED, "model_parallel_config": {"fp16": True}}
OVERLAP = {
    "ddp_config": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "optimizer_config": {**BF16["optimizer_config"], "overlap_param_gather": True},
    "model_parallel_config": BF16["model_parallel_config"],
}
LOW: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "main parameters": ("megatron dp2", BF16, torch.bfloat16),
    "parts of the parameters themselves": ("megatron dp2 distributed", {}, torch.float32),
    "main parameters of a model in float32": ("megatron dp2", BF16, torch.float32),
    "distributed": ("megatron dp2 distributed", BF16, torch.bfloat16),
    "distributed, gathered in the next forward": ("megatron dp2 distributed", OVERLAP, torch.bfloat16),
    "fp16, distributed": ("megatron dp2 distributed", FP16, torch.float16),
}
LOW = dict(sampled(LOW.items(), 3))


def own(weight_decay: float, **scheduler: Any) -> dict[str, Any]:
    """Megatron's own AdamW, of ``optimizer_config``."""
    config = {
        "lr": 0.01,
        "adam_eps": 1e-4,
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "weight_decay": weight_decay,
        "min_lr": 0.0,
        "clip_grad": 0.0,
    }
    return {"optimizer": None, "optimizer_config": config, "scheduler": scheduler}


def vectors_apart(weight_decay: float) -> Callable[[Any], torch.optim.Optimizer]:
    """An AdamW of torch that does the same: Megatron lets vectors decay never."""

    def made(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        decaying = [one for one in parameters if one.dim() != 1]
        others = [one for one in parameters if one.dim() == 1]
        groups = [{"params": others, "weight_decay": 0.0}, {"params": decaying, "weight_decay": weight_decay}]
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-4, betas=(0.8, 0.95))

    return made


def one_group(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, betas=(0.8, 0.95), weight_decay=0.1)


def own_optimizer(directory: Path) -> dict[str, Any]:
    """Megatron's optimizer by its configuration, and one of torch with the same settings: each loads the other's."""
    found: dict[str, Any] = {}
    by_factory = {"optimizer": vectors_apart(0.1)}
    for form, options, other, others in (
        ("megatron dp2 distributed", own(0.1), "torch tp2", by_factory),
        ("torch tp2", by_factory, "megatron dp2", own(0.1)),
        ("megatron dp2", own(0.0), "torch tp2", {"optimizer": vectors_apart(0.0)}),
    ):
        engine = build(form, **options)
        train(engine, 0, 2)
        engine.save(directory / form)
        train(engine, 2, 4)
        again = build(other, seed=7, **others)
        told = said(again.load, directory / form)
        train(again, 2, 4)
        one, two = engine.state_dict(), again.state_dict()
        found[f"{form} to {other}"] = (told, [name for name in one if (one[name] - two[name]).abs().max() > 3e-6])
        for each in (engine, again):
            each.close()
    return found


def other_groups(directory: Path) -> dict[str, str]:
    """One group and Megatron's two: what the checkpoint had and what this engine would do differ, and that is said."""
    torch_one = build("torch tp2", optimizer=one_group)
    train(torch_one, 0, 1)
    torch_one.save(directory / "one")
    with_groups = build("megatron dp2", **own(0.1))
    found = {"one group into two": said(with_groups.load, directory / "one")}
    train(with_groups, 1, 2)
    with_groups.save(directory / "two")
    found["two groups into one"] = said(torch_one.load, directory / "two")
    factory = build("megatron dp2", optimizer=vectors_apart(0.1))
    found["one group into two of a factory"] = said(factory.load, directory / "one")
    for engine in (with_groups, factory):
        engine.close()
    return found


def schedulers(directory: Path) -> dict[str, Any]:
    """A warm-up and a decay: their places go with the checkpoint."""
    warm = {"lr_warmup_steps": 3, "lr_decay_steps": 9, "lr_decay_style": "linear"}

    def rates(engine: Any, first: int, last: int) -> list[tuple[float, float]]:
        found = []
        for step in range(first, last):
            train(engine, step, step + 1)
            found.append(tuple(group["lr"] for group in engine.optimizer.param_groups))
        return found

    engine = build("megatron dp2 distributed", **own(0.1, **warm))
    rates(engine, 0, 2)
    engine.save(directory / "warm")
    wanted = rates(engine, 2, 4)
    engine.close()
    again = build("megatron dp2", seed=7, **own(0.1, **warm))
    rates(again, 0, 1)  # its own steps count no more
    told = [said(again.load, directory / "warm")]
    resumed = rates(again, 2, 4)
    again.close()
    longer_decay: dict[str, Any] = {**warm, "lr_decay_steps": 90}
    longer = build("megatron dp2", **own(0.1, **longer_decay))
    told.append(said(longer.load, directory / "warm"))
    taken = longer.megatron.scheduler.lr_decay_steps
    longer.close()
    without = build("megatron dp2")
    told.append(said(without.load, directory / "warm"))
    without.save(directory / "plain")
    without.close()
    strict = build("megatron dp2", **own(0.1, **longer_decay, use_checkpoint_opt_param_scheduler=False))
    told.append(said(strict.load, directory / "warm"))
    strict.close()
    return {"rates": [wanted, resumed], "taken": taken, "told": told}


def scales(directory: Path) -> dict[str, Any]:
    """The dynamic scale of the loss: overflows bring it down, and that stays so after a load."""
    engine = build("megatron dp2 distributed", dtype=torch.float16, **FP16)
    train(engine, 0, 12)
    engine.save(directory)
    (scaler,) = [one.grad_scaler for one in engine.optimizer.chained_optimizers]
    before = scaler.state_dict()
    engine.close()
    again = build("megatron dp2", dtype=torch.float16, **FP16)
    told = said(again.load, directory)
    (other,) = [one.grad_scaler for one in again.optimizer.chained_optimizers]
    after = other.state_dict()
    again.close()
    return {"scale": [float(before["scale"]), float(after["scale"])], "same": str(before) == str(after), "told": told}


@contextlib.contextmanager
def masters_left_alone() -> Iterator[None]:
    """A fault: a load that writes what the forward computes with, and not what is trained."""

    def loading(self: Any, live: Any, value: torch.Tensor) -> Any:
        return lambda: live.tensor.data.copy_(value)

    with mock.patch.object(FlatTensors, "loading", loading):
        yield


@contextlib.contextmanager
def moments_of_another() -> Iterator[None]:
    """A fault: two parameters of one shape get each other's moments."""
    right = FlatOptimizer.loading

    def loading(self: Any, groups: Any, states: Any) -> Any:
        (one, other, *_) = [parameter for parameter in states if tuple(parameter.shape) == (14, 10)]
        return right(self, groups, {**states, one: states[other], other: states[one]})

    with mock.patch.object(FlatOptimizer, "loading", loading):
        yield


def faults(directory: Path) -> dict[str, Any]:
    """What the comparisons of the other cases say where something is loaded wrongly."""
    form = "megatron dp2 distributed"
    engine = build(form, dtype=torch.bfloat16, **BF16)
    train(engine, 0, 2)
    engine.save(directory)
    train(engine, 2, 4)
    wanted = engine.state_dict()
    engine.close()
    found = {}
    for fault in (contextlib.nullcontext, masters_left_alone, moments_of_another):
        other = build(form, seed=7, dtype=torch.bfloat16, **BF16)
        with fault():
            other.load(directory)
        loaded = said(other.check_replicas)
        train(other, 2, 4)
        found[fault.__name__] = (loaded, len(different(other.state_dict(), wanted)))
        other.close()
    return found


def corrupted() -> dict[str, Any]:
    """Copies that are changed on one rank, or on all of them behind Megatron's back."""
    found: dict[str, Any] = {}
    name = "blocks.0.up.weight"
    for form, dtype, options, ranks in (
        ("megatron dp2", torch.float32, {}, (1,)),
        ("megatron dp2", torch.bfloat16, BF16, (0, 1)),
        ("megatron dp2 distributed", torch.bfloat16, BF16, (1,)),
    ):
        engine = build(form, dtype=dtype, **options)
        train(engine, 0, 1)
        before = engine.state_dict()
        with torch.no_grad():
            engine.module.get_parameter(name).data.add_(float(dist.get_rank() in ranks))
        found[f"{form}, {dtype}, on {ranks}"] = [
            said(engine.check_replicas),
            said(engine.check_replicas, repair=True),
            said(engine.check_replicas),
            different(engine.state_dict(), before),
        ]
        engine.close()
    engine = build("megatron dp2")
    train(engine, 0, 1)
    parameter = engine.module.get_parameter("blocks.0.norm.weight")
    (one,) = engine.optimizer.chained_optimizers
    if dist.get_rank() == 1:
        one.optimizer.state[parameter]["exp_avg"].add_(1.0)
    found["a moment"] = [said(engine.check_replicas), said(engine.check_replicas, repair=True)]
    found["a moment"] += [said(engine.check_replicas), []]
    engine.close()
    return found


def ends(directory: Path) -> dict[str, Any]:
    """What an engine says after its end, and one without an optimizer."""
    engine = build("megatron dp2 distributed")
    train(engine, 0, 1)
    there = engine.optimizer is engine.megatron.optimizer
    state = engine.state_dict()
    engine.close()
    engine.close()
    after = different(engine.state_dict(), state)
    limited = build("megatron dp2")
    limited._layout.limit = "with something new it keeps a state of its own"
    train(limited, 0, 1)
    unsaved = [said(limited.save, directory), said(limited.load, directory), said(limited.save_sharded, directory)]
    trained = different(limited.state_dict(), state)
    limited.close()
    evaluating = build("megatron dp2 distributed", optimizer=None)
    plain = build("megatron dp2").state_dict()
    return {
        "optimizer": (there, engine.optimizer, evaluating.optimizer),
        "unsaved": (unsaved, trained),
        "steps": [said(train, engine, 0, 1), said(train, evaluating, 0, 1)],
        "differing": after + different(evaluating.state_dict(), plain),
    }


def all_cases(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, (form, options, dtype) in LOW.items():
        found[case] = low_precision(form, options, dtype, directory / case)
    forms = ("megatron dp2", "megatron dp2 distributed")
    found["before the first step"] = before_the_first_step(forms, directory / "fresh")
    found["own optimizer"] = own_optimizer(directory / "own")
    found["other groups"] = other_groups(directory / "groups")
    found["schedulers"] = schedulers(directory / "schedulers")
    found["scales"] = scales(directory / "scales")
    found["faults"] = faults(directory / "faults")
    found["corrupted"] = corrupted()
    found["ends"] = ends(directory / "ends")
    return found
