"""DeepSpeed's engine, with the optimizer of the user's factory or of its own configuration."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slapo_deepspeed.config import AUTO
from slapo_deepspeed.state import Group, groups_of
from slapo_deepspeed.zero.partitioning import with_shapes

if TYPE_CHECKING:
    from torch import nn

    from slapo_core import Plan
    from slapo_runtime.context import BuildContext


def has_optimizer(plan: Plan, context: BuildContext) -> bool:
    """Whether anything trains: the user's factory, or DeepSpeed's optimizer by its configuration."""
    return context.optimizer is not None or bool(plan.config["config"].get("optimizer"))


def initialize(
    plan: Plan, context: BuildContext, model: nn.Module, *, mpu: Any = None, also: Sequence[nn.Parameter] = ()
) -> tuple[Any, list[Group] | None]:
    """Make DeepSpeed's engine; every tensor of the model is in its place by now.

    Args:
        plan: ``plan.config["config"]`` is DeepSpeed's configuration, filled in; DeepSpeed changes a copy of it.
        context: of the build; its optimizer is made here.
        model: the scheduled model, or DeepSpeed's ``PipelineModule`` of its stages.
        mpu: the groups of the mesh; None with a ``PipelineModule``, which has its own.
        also: trained parameters that are not of the scheduled model.

    Returns:
        the engine, and the groups of the optimizer as they were before DeepSpeed saw it; None for its own optimizer.
    """
    import deepspeed

    config = copy.deepcopy(dict(plan.config["config"]))
    zero = config.get("zero_optimization", {})
    if not has_optimizer(plan, context) and zero.get("stage", 0) in (1, 2):
        zero["stage"] = 0  # they partition what an optimizer needs; there is nothing of it
    with context.together("making the optimizer"), with_shapes(context.schedule.model):
        optimizer = context.make_optimizer(partitioned=zero.get("stage", 0) > 0)
    groups = None if optimizer is None else groups_of(optimizer.param_groups, keeps_first=bool(also))
    _leave_out_frozen(optimizer, also)
    _fill_rates(config, optimizer)
    idle = _idle(optimizer) if _steps_at_construction(config) else contextlib.nullcontext()
    with _numbers_left_out(model), idle:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
    if _steps_at_construction(config):
        _start_afresh(engine.optimizer)
    return engine, groups


def _leave_out_frozen(optimizer: torch.optim.Optimizer | None, also: Sequence[nn.Parameter]) -> None:
    """DeepSpeed drops a group without parameters, and fails with one that has only frozen ones."""
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [one for one in group["params"] if one.requires_grad]
    optimizer.param_groups[0]["params"] += also


def _fill_rates(config: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
    """Let a scheduler warm up to the learning rates of the factory's optimizer, where the configuration is "auto"."""
    params = (config.get("scheduler") or {}).get("params") or {}
    if optimizer is not None and params.get("warmup_max_lr") == AUTO:
        params["warmup_max_lr"] = [float(group["lr"]) for group in optimizer.param_groups if group["params"]]


@contextlib.contextmanager
def _numbers_left_out(model: nn.Module) -> Iterator[None]:
    """DeepSpeed sends every parameter of the first replica to the others as bytes, and fails where one has no axes.

    Replicas have the same values before.
    """
    numbers: list[Any] = [one for one in model.parameters() if not one.dim() and not hasattr(one, "ds_optim_param")]
    for number in numbers:
        number.ds_optim_param = True  # which it does not send
    try:
        yield
    finally:
        for number in numbers:
            del number.ds_optim_param


def _steps_at_construction(config: dict[str, Any]) -> bool:
    """Whether DeepSpeed steps the optimizer with zero gradients to create its state: main weights without ZeRO."""
    low = any(config.get(name, {}).get("enabled") for name in ("bf16", "bfloat16", "fp16"))
    return low and config.get("zero_optimization", {}).get("stage", 0) == 0


@contextlib.contextmanager
def _idle(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Let an optimizer's step do nothing: that of a trial decays the weights, and counts as the first one."""
    if optimizer is None:
        yield
        return
    optimizer.step = types.MethodType(lambda *_: None, optimizer)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del optimizer.step


def _start_afresh(wrapper: Any) -> None:
    """Undo the trial step of DeepSpeed's own optimizer: its state, and its changes of the main weights."""
    inner = getattr(wrapper, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer) or not hasattr(
        wrapper, "fp16_groups"
    ):  # a pipeline's makes no trial
        return
    inner.state.clear()
    with torch.no_grad():
        for number, parameters in enumerate(wrapper.fp16_groups):
            if hasattr(wrapper, "fp32_groups_flat"):
                offset = 0
                for parameter in parameters:
                    shard = wrapper.fp32_groups_flat[number].narrow(0, offset, parameter.numel())
                    shard.copy_(parameter.detach().reshape(-1))
                    offset += parameter.numel()
            else:
                for master, parameter in zip(wrapper.fp32_groups[number], parameters, strict=True):
                    master.copy_(parameter)
