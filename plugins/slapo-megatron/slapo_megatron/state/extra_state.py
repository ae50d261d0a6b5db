"""Save and load the extra state of a run: Megatron's scheduler, and the loss scales."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slapo_core import BuildError

if TYPE_CHECKING:
    from slapo_megatron.runtime import Megatron

SCHEDULER, SCALERS, COUNTERS = "megatron_scheduler", "megatron_grad_scalers", "counters"
_STEPS = "num_steps"
_OWN = 'scheduler={"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": False}'


def read_extra_state(megatron: Megatron) -> dict[str, Any]:
    """Return the extra state of Megatron's objects, as JSON."""
    found: dict[str, Any] = {}
    if megatron.scheduler is not None:
        found[COUNTERS] = {_STEPS: megatron.scheduler.num_steps}
        if _depends_on_steps(megatron.scheduler):
            found[SCHEDULER] = dict(megatron.scheduler.state_dict())
    scalers = _scalers(megatron)
    if scalers:
        found[SCALERS] = [{key: _number(value) for key, value in one.state_dict().items()} for one in scalers]
    return found


def used_extra_state(megatron: Megatron) -> list[str]:
    """List the entries of a checkpoint's extra state that an engine uses."""
    there = {SCHEDULER: megatron.scheduler is not None, SCALERS: bool(_scalers(megatron)), COUNTERS: True}
    return [name for name, is_there in there.items() if is_there]


def write_extra_state(megatron: Megatron, found: Mapping[str, Any], loaded: Sequence[Mapping[str, Any]]) -> None:
    """Let Megatron's objects go on from what :func:`read_extra_state` gave; warnings say what goes on otherwise.

    Args:
        megatron: its objects.
        found: of the checkpoint.
        loaded: the settings of the optimizer's groups in the checkpoint.

    Raises:
        BuildError: the scheduler has other settings than that of the checkpoint, and was told to refuse that.
    """
    import torch

    saved = found.get(SCALERS)
    for number, scaler in enumerate(_scalers(megatron)):
        if saved:
            state = dict(saved[min(number, len(saved) - 1)])
            scaler.load_state_dict({**state, "scale": torch.tensor([state["scale"]], device=scaler.scale.device)})
    scheduler = megatron.scheduler
    if scheduler is None:
        return
    if SCHEDULER in found:
        _resume(scheduler, found[SCHEDULER])
    elif _STEPS in found.get(COUNTERS, {}):
        scheduler.num_steps = found[COUNTERS][_STEPS]
    elif _depends_on_steps(scheduler):
        warnings.warn(
            "the checkpoint holds no state of Megatron's scheduler: OptimizerParamScheduler goes on from step "
            f"{scheduler.num_steps}, and sets rates and decays by it",
            stacklevel=4,
        )
    scheduler.step(0)
    different = list(_set_otherwise(scheduler.optimizer.param_groups, loaded))
    if different:
        warnings.warn(
            "Megatron's scheduler sets other values than the checkpoint had: " + "; ".join(different), stacklevel=4
        )


def _resume(scheduler: Any, saved: Mapping[str, Any]) -> None:
    own = scheduler.state_dict()
    other = {key: value for key, value in saved.items() if key != _STEPS and own.get(key) != value}
    shown = ", ".join(f"{key} = {value!r} (here {own.get(key)!r})" for key, value in other.items())
    if other and not (scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler):
        raise BuildError(
            f"the checkpoint's scheduler has {shown}, and this one is told to take neither these nor its own; weights "
            "and the optimizer's state are loaded",
            hint=f'{_OWN} keeps its own, scheduler={{"use_checkpoint_opt_param_scheduler": True}} takes the others',
        )
    rates = {"max_lr": scheduler.max_lr, "min_lr": scheduler.min_lr}
    scheduler.num_steps = 0  # loaded values are added
    scheduler.load_state_dict(dict(saved))
    if other and not scheduler.override_opt_param_scheduler:
        for group in scheduler.optimizer.param_groups:
            for name, before in rates.items():  # a group has its own, of the same configuration
                if group.get(name) == before:
                    group[name] = getattr(scheduler, name)
        warnings.warn(
            f"Megatron's scheduler goes on with {shown}, as the checkpoint has it; {_OWN} keeps its own",
            stacklevel=5,
        )


def _depends_on_steps(scheduler: Any) -> bool:
    rates = scheduler.lr_decay_style != "constant" or scheduler.lr_warmup_steps > 0
    return rates or scheduler.wd_incr_style != "constant"


def _set_otherwise(present: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for number, (group, settings) in enumerate(zip(present, loaded, strict=True)):
        for key in ("lr", "weight_decay"):
            if key in settings and not math.isclose(group[key], float(settings[key]), rel_tol=1e-9):
                yield f"{key} of group {number} = {group[key]:g}, and not {float(settings[key]):g}"


def _scalers(megatron: Megatron) -> list[Any]:
    """Those whose scale changes, of each optimizer."""
    optimizer = megatron.optimizer
    found = [getattr(one, "grad_scaler", None) for one in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [scaler for scaler in found if scaler is not None and scaler.state_dict()]


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
