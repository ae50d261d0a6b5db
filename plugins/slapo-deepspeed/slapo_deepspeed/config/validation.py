"""Validate a configuration by DeepSpeed itself, naming the wrong place, without process groups."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from slapo_core import BuildError
from slapo_deepspeed.config.draft import Draft
from slapo_deepspeed.config.settings import nearest, optimizer_name
from slapo_deepspeed.process_groups import import_deepspeed, quietly

_NEEDED = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def validate(draft: Draft) -> None:
    """Let DeepSpeed read the configuration.

    Raises:
        BuildError: DeepSpeed's own error with its place; or DeepSpeed cannot be used.
    """
    import_deepspeed(draft.facts.device)
    whole = _refusals(draft.config)
    if whole:
        needed = {key: draft.config[key] for key in _NEEDED}
        alone = {key: _refusals({**needed, key: draft.config[key]}) for key in draft.config if key not in needed}
        shown = [
            f"{draft.source.of('.'.join((key, *place)))}: {reason}"
            for key, found in alone.items()
            for place, reason in found
        ] or [f"{draft.source}: {reason}" for _, reason in whole]
        start = "DeepSpeed refuses"
        raise BuildError(
            f"{start} {shown[0]}" if len(shown) == 1 else "\n".join([f"{start}:", *(f"  - {one}" for one in shown)])
        )
    _check_precision(draft)
    _check_optimizer(draft)
    _check_scheduler(draft)


def _refusals(config: dict[str, Any]) -> list[tuple[tuple[str, ...], str]]:
    """Each with the keys below the one that it is about, as far as DeepSpeed says them."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    # Without the total, it takes the number of ranks from this process, which may have no group yet.
    mine = {key: value for key, value in copy.deepcopy(config).items() if key != "train_batch_size"}
    try:
        with quietly():
            DeepSpeedConfig(mine)
    except ValidationError as error:
        found = [(tuple(map(str, one["loc"])), one) for one in error.errors()]
        return [(place, f"{one['msg']} (got {one['input']!r})") for place, one in found]
    except Exception as error:  # noqa: BLE001 - its checks raise assertions, and whatever a wrong type leads to
        return [((), f"{type(error).__name__}: {error}")]
    return []


def _check_precision(draft: Draft) -> None:
    """Refuse precisions that DeepSpeed would refuse only after taking the model."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.config import DtypeEnum

    source, device = draft.source, get_accelerator()
    half = bool(draft.get("fp16.enabled"))
    brain = bool(draft.get("bf16.enabled") or draft.get("bfloat16.enabled"))
    if half and not device.is_fp16_supported():
        raise BuildError(
            f"{source.of('fp16.enabled')} is true, but '{device.device_name()}' has no fp16 in DeepSpeed",
            hint='"bf16": {"enabled": true}',
        )
    if brain and not device.is_bf16_supported():
        raise BuildError(
            f"{source.of('bf16.enabled')} is true, but '{device.device_name()}' has no bf16",
            hint='"fp16": {"enabled": true}',
        )
    model = DtypeEnum("fp16" if half else "bf16" if brain else "fp32").value
    for name in ("param_dtype", "buffer_dtype", "grad_accum_dtype"):
        given = draft.get(f"data_types.{name}")
        if given is None:
            continue
        try:
            dtype = DtypeEnum(given).value
        except ValueError as error:
            raise BuildError(
                f"{source.of(f'data_types.{name}')} must be a type (got {given!r})", hint='"fp32", "bf16" or "fp16"'
            ) from error
        if dtype == model or name == "buffer_dtype":
            continue
        if name == "param_dtype":
            raise BuildError(
                f"{source.of('data_types.param_dtype')} is {given!r}, but the parameters are in "
                f"{str(model).removeprefix('torch.')}, as 'fp16' and 'bf16' say",
                hint="leave it out",
            )
        if draft.get("zero_optimization.stage") == 0:
            raise BuildError(
                f"{source.of('data_types.grad_accum_dtype')} is {given!r}, but without ZeRO gradients have the type of "
                f"the parameters, {str(model).removeprefix('torch.')}",
                hint='"zero_optimization": {"stage": 1}',
            )


_ADAM_ONLY = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
"""Params that DeepSpeed takes out before it calls what makes the optimizer."""


def _check_optimizer(draft: Draft) -> None:
    """Whether its params are some that it has."""
    name, params = optimizer_name(draft.config), draft.get("optimizer.params") or {}
    if name is None:
        return
    try:
        inspect.signature(_kind(draft, name)).bind(None, **{k: v for k, v in params.items() if k not in _ADAM_ONLY})
    except TypeError as error:
        raise BuildError(f"{draft.source.of('optimizer.params')}: {name} {error}") from error


def _kind(draft: Draft, name: str) -> Any:
    """The class that DeepSpeed will call."""
    import torch
    from deepspeed.ops import adagrad, adam, lamb, lion

    offloads = draft.get("zero_optimization.offload_optimizer.device") not in (None, "none")
    own: dict[str, Any] = {
        "adagrad": adagrad.DeepSpeedCPUAdagrad if offloads else torch.optim.Adagrad,
        "adam": adam.DeepSpeedCPUAdam if offloads else adam.FusedAdam,
        "lamb": lamb.FusedLamb,
        "lion": lion.DeepSpeedCPULion if offloads else lion.FusedLion,
    }
    if name in ("adam", "adamw"):
        return torch.optim.AdamW if draft.get("optimizer.params.torch_adam") else own["adam"]
    return own[name] if name in own else getattr(torch.optim, name)


def _check_scheduler(draft: Draft) -> None:
    name = draft.get("scheduler.type")
    if name is None:
        return
    import torch
    from deepspeed.runtime import lr_schedules

    own = [one for one in dir(lr_schedules) if isinstance(getattr(lr_schedules, one), type)]
    kind = getattr(lr_schedules, name, None) if name in own else getattr(torch.optim.lr_scheduler, name, None)
    if not isinstance(kind, type) or "optimizer" not in inspect.signature(kind).parameters:
        raise BuildError(
            f"{draft.source.of('scheduler.type')} is {name!r}, which is not a scheduler of DeepSpeed 0.19 or "
            f"torch.optim.lr_scheduler{nearest(name, [*own, *torch.optim.lr_scheduler.__all__])}"
        )
    try:
        inspect.signature(kind).bind(None, **draft.get("scheduler.params"))
    except TypeError as error:
        raise BuildError(f"{draft.source.of('scheduler.params')}: {name} {error}") from error
