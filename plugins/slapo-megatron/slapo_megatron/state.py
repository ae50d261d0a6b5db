"""Locate main weights and optimizer state in Megatron's optimizers, for state dicts and checkpoints.

Imports Megatron: import it in functions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from slapo_core import BuildError
from slapo_core.errors import warn_user
from slapo_megatron.private import start_of
from slapo_runtime.correspondence.flat_storage import (
    FlatOptimizer,
    FlatStorage,
    FlatTensors,
    StoredGroup,
    StoredParameter,
    merge_across_ranks,
)
from slapo_runtime.engine import REBUILD, StepInvariants
from slapo_runtime.flat_shards import FlatShard

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_megatron.runtime import Megatron
    from slapo_runtime.context import BuildContext
    from slapo_runtime.correspondence.storage import LiveTensor


@dataclass
class OptimizerLayout:
    """The storage of this rank's parameters in Megatron's optimizers.

    Args:
        held: id of a trained parameter -> its storage.
        groups: (optimizer, group index, parameters), with parameters of which only other replicas have partitions.
        order: the parameters that are views of Megatron's communication buffers, in an order that replicas share.
        shared: the process groups over which the state is partitioned; the replicas are their product.
        limit: why this state cannot be saved by the names of the reference model; empty if it can.
    """

    held: dict[int, StoredParameter] = field(default_factory=dict)
    groups: list[tuple[torch.optim.Optimizer, int, list[torch.Tensor]]] = field(default_factory=list)
    order: list[torch.Tensor] = field(default_factory=list)
    shared: list[Any] = field(default_factory=list)
    limit: str = ""


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of torch in an optimizer of Megatron's; none of None."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one.optimizer for one in chained if one is not None and one.optimizer is not None]


def optimizer_layout(optimizer: Any, mesh: Mesh | None) -> OptimizerLayout:
    """Locate the main weights of Megatron's optimizer: a collective over its replicas.

    Args:
        optimizer: None where nothing is trained.
        mesh: of the schedule.
    """
    kept = OptimizerLayout()
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if one is None or one.optimizer is None:
            continue  # there is nothing to train on this rank
        kept.limit = kept.limit or _limit(one)
        if kept.limit:
            continue
        if isinstance(one, DistributedOptimizer):
            _partitioned(one, kept, mesh)
        else:
            copies = dict(_copies(one)) if isinstance(one, Float16OptimizerWithFloat16Params) else {}
            _replicated(one, kept, copies)
    return kept


def _limit(one: Any) -> str:
    """Return why the state of one of Megatron's optimizers cannot be expressed; empty if it can."""
    if isinstance(one.optimizer, HybridDeviceOptimizer):
        return "with optimizer_cpu_offload its state is split between two devices"
    if one.config.use_precision_aware_optimizer:
        return "with use_precision_aware_optimizer it keeps main weights and moments in formats of its own"
    if isinstance(one, DistributedOptimizer) and one.ddp_config.num_distributed_optimizer_instances > 1:
        return "with num_distributed_optimizer_instances replicas partition it in groups"
    if isinstance(one, (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)):
        return ""
    return f"where {type(one).__name__} keeps its main weights is unknown"


def _copies(one: Float16OptimizerWithFloat16Params) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the id of each main parameter, with the parameter of the model."""
    for parameters, mains in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
        for parameter, main in zip(parameters, mains, strict=True):
            yield id(main), parameter


def _replicated(one: Any, kept: OptimizerLayout, copies: dict[int, torch.Tensor]) -> None:
    """Add an optimizer whose state is replicated: it steps full main weights, or the parameters."""
    for number, group in enumerate(one.optimizer.param_groups):
        parameters = [copies.get(id(stepped), stepped) for stepped in group["params"]]
        for stepped, parameter in zip(group["params"], parameters, strict=True):
            if not stepped.is_contiguous():
                kept.limit = f"a parameter of shape {tuple(stepped.shape)} is not contiguous, and its moments neither"
            elif parameter.requires_grad:
                place = FlatShard.full(stepped, tuple(parameter.shape))
                kept.held[id(parameter)] = StoredParameter(place, dtype=stepped.dtype, optimizer=one.optimizer)
        kept.groups.append((one.optimizer, number, parameters))


def _partitioned(one: DistributedOptimizer, kept: OptimizerLayout, mesh: Mesh | None) -> None:
    """Add a distributed optimizer: replicas partition flat buffers, and lack parameters without an element."""
    is_part = one.data_parallel_group.size() > 1
    kept.shared = [mesh.group("dp")] if is_part and mesh is not None else []
    order = [parameter for buffer in one.buffers for parameter in buffer.param_index_map]
    kept.order += order
    number_of = {id(parameter): number for number, parameter in enumerate(order)}
    group_of: dict[int, int] = {}
    for parameters_of_groups, parts_of_groups in (
        (one.model_float16_groups, one.shard_fp32_from_float16_groups),
        (one.model_fp32_groups, one.shard_fp32_groups),
    ):
        for number, (parameters, parts) in enumerate(zip(parameters_of_groups, parts_of_groups, strict=True)):
            for parameter, part in zip(parameters, parts, strict=True):
                place = FlatShard(part, 0, start_of(one, parameter), part.numel(), tuple(parameter.shape))
                kept.held[id(parameter)] = StoredParameter(place, None, part.dtype, is_part, one.optimizer)
                group_of[number_of[id(parameter)]] = number
    group_of = merge_across_ranks(group_of, mesh if kept.shared else None)
    for number in range(len(one.optimizer.param_groups)):
        inside = [parameter for at, parameter in enumerate(order) if group_of.get(at) == number]
        kept.groups.append((one.optimizer, number, inside))
        for parameter in inside:
            kept.held.setdefault(id(parameter), StoredParameter(None, None, torch.float32, True, one.optimizer))


# -- the optimizer ---------------------------------------------------------------------------------------------------

_OF_THE_BUILD = re.compile(
    "(pre_)?(wd|lr)_mult|(max|min)_lr|(start|end)_wd|default_config|is_(expert_parallel|decoupled_lr)"
)
"""Settings of Megatron's own groups for its scheduler, left out of checkpoints."""

_MADE_BY_MEGATRON = "wd_mult"  # a setting of each of Megatron's own groups

_FUSED = ("lr", "betas", "eps", "weight_decay")  # settings that a fused Adam shares with torch's
_STEP = "step"


def counts_in_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer counts steps by group: the fused Adam of Transformer Engine and Apex."""
    return type(optimizer).__name__ == "FusedAdam"


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of torch's class with the same update."""
    if not counts_in_groups(optimizer):
        return type(optimizer).__name__
    return "AdamW" if getattr(optimizer, "adam_w_mode", True) else "Adam"


def settings_of(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings, live or loaded, that belong in a checkpoint.

    Groups of a factory keep all settings: there, ``max_lr`` is of torch's OneCycleLR.
    """
    if counts_in_groups(optimizer):
        return {key: values[key] for key in _FUSED if key in values}
    is_own = _MADE_BY_MEGATRON in group
    return {
        key: one for key, one in values.items() if key != "params" and not (is_own and _OF_THE_BUILD.fullmatch(key))
    }


class StoredOptimizer(FlatOptimizer):
    """Read and load Megatron's optimizers by the parameters of the model.

    Args:
        layout: of Megatron's optimizers.
        storage: of the parameters.
        names: id of a parameter -> its name, for messages.
        is_scheduled: whether a scheduler of Megatron sets rates and decays.
    """

    def __init__(
        self, layout: OptimizerLayout, storage: FlatStorage, names: Mapping[int, str], *, is_scheduled: bool
    ) -> None:
        self._live = [(inner, inner.param_groups[number]) for inner, number, _ in layout.groups]
        groups = [
            StoredGroup(parameters, settings_of(inner, group, group))
            for (inner, group), (_, _, parameters) in zip(self._live, layout.groups, strict=True)
        ]
        inner = [optimizer for optimizer, _ in self._live]
        scheduled = ("lr", "weight_decay") if is_scheduled else ()
        super().__init__(storage, groups, names, "Megatron", inner, scheduled=scheduled)

    def kind_of(self, optimizer: torch.optim.Optimizer) -> str:
        return kind_of(optimizer)

    def state_of(self, held: StoredParameter) -> dict[str, Any]:
        found = super().state_of(held)
        assert held.main is not None
        assert held.optimizer is not None
        if found and counts_in_groups(held.optimizer):
            found[_STEP] = torch.tensor(float(_group_of(held.optimizer, held.main.flat).get(_STEP, 0)))
        return found

    def put(self, optimizer: torch.optim.Optimizer, flat: torch.Tensor, state: dict[str, Any]) -> None:
        if counts_in_groups(optimizer):
            group, count = _group_of(optimizer, flat), state.pop(_STEP, None)
            if count is not None:
                group[_STEP] = int(count)
            elif not state:
                group.pop(_STEP, None)
        super().put(optimizer, flat, state)

    def set_groups(self, settings: Sequence[Mapping[str, Any]]) -> None:
        for (inner, group), values in zip(self._live, settings, strict=True):
            group.update(settings_of(inner, group, values))


def _group_of(optimizer: torch.optim.Optimizer, flat: torch.Tensor) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(flat is one for one in group["params"]))


# -- external changes ------------------------------------------------------------------------------------------------


class MegatronExternalChanges(StepInvariants):
    """Refuse changes of the parameters between steps, and of their memory in Megatron's buffers.

    Args:
        context: of the build.
        layout: of Megatron's optimizers.
        tensors: compares the forward's parameters with their main weights.
    """

    def __init__(self, context: BuildContext, layout: OptimizerLayout, tensors: FlatTensors) -> None:
        super().__init__(context, tensors, "Megatron", partitioned=bool(layout.shared))
        in_buffers = {id(parameter) for parameter in layout.order}
        self._addresses = {id(one): one.data_ptr() for one in self._tensors if id(one) in in_buffers}

    def check(self) -> list[LiveTensor]:
        written = super().check()
        for live in written:
            if live.tensor.data_ptr() != self._addresses.get(id(live.tensor), live.tensor.data_ptr()):
                raise BuildError(
                    f"'{live.name}' got new memory after the build (parameter.data = ...): the model no longer uses "
                    "Megatron's buffer",
                    hint="write into it: parameter.data.copy_(values); " + REBUILD,
                )
        return written

    def stamps(self) -> list[Any]:
        """Return the stamps, which also change with a parameter's memory."""
        return list(zip(super().stamps(), [tensor.data_ptr() for tensor in self._tensors], strict=True))

    def steps_frozen(self, live: LiveTensor) -> bool:
        """Return True: Megatron steps by its own buffer of gradients."""
        return True


# -- the scheduler and the loss scale --------------------------------------------------------------------------------

SCHEDULER, SCALERS, COUNTERS = "megatron_scheduler", "megatron_grad_scalers", "counters"
_STEPS = "num_steps"
_OWN = 'scheduler={"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": False}'


def read_extra_state(megatron: Megatron) -> dict[str, Any]:
    """Return the state of Megatron's scheduler and loss scales, as JSON."""
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
    """Return the names of a checkpoint's extra state that the engine loads."""
    there = {SCHEDULER: megatron.scheduler is not None, SCALERS: bool(_scalers(megatron)), COUNTERS: True}
    return [name for name, is_there in there.items() if is_there]


def write_extra_state(megatron: Megatron, found: Mapping[str, Any], loaded: Sequence[Mapping[str, Any]]) -> None:
    """Load scheduler and loss scales from :func:`read_extra_state`; warn of different settings.

    Args:
        megatron: its objects.
        found: extra state of the checkpoint.
        loaded: settings of the optimizer's groups in the checkpoint.

    Raises:
        BuildError: Megatron's scheduler refuses the checkpoint's settings.
    """
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
        warn_user(
            "the checkpoint has no state of Megatron's scheduler: OptimizerParamScheduler continues at step "
            f"{scheduler.num_steps}, which sets rates and decays",
        )
    scheduler.step(0)
    different = [
        f"{key} of group {number} = {group[key]:g}, not {float(settings[key]):g}"
        for number, (group, settings) in enumerate(zip(scheduler.optimizer.param_groups, loaded, strict=True))
        for key in ("lr", "weight_decay")
        if key in settings and not math.isclose(group[key], float(settings[key]), rel_tol=1e-9)
    ]
    if different:
        warn_user(
            "Megatron's scheduler sets other values than the checkpoint has: " + "; ".join(different),
        )


def _resume(scheduler: Any, saved: Mapping[str, Any]) -> None:
    own = scheduler.state_dict()
    other = {key: value for key, value in saved.items() if key != _STEPS and own.get(key) != value}
    shown = ", ".join(f"{key} = {value!r} (here {own.get(key)!r})" for key, value in other.items())
    rates = {"max_lr": scheduler.max_lr, "min_lr": scheduler.min_lr}
    scheduler.num_steps = 0  # loaded values are added
    try:
        scheduler.load_state_dict(dict(saved))
    except AssertionError as error:
        raise BuildError(
            f"Megatron refuses the scheduler of the checkpoint: {error}", hint=f"{_OWN} keeps its own"
        ) from error
    if other and not scheduler.override_opt_param_scheduler:
        for group in scheduler.optimizer.param_groups:
            for name, before in rates.items():  # a group has its own copy of the configuration
                if group.get(name) == before:
                    group[name] = getattr(scheduler, name)
        warn_user(
            f"Megatron's scheduler continues with {shown} of the checkpoint; {_OWN} keeps its own",
        )


def _depends_on_steps(scheduler: Any) -> bool:
    rates = scheduler.lr_decay_style != "constant" or scheduler.lr_warmup_steps > 0
    return rates or scheduler.wd_incr_style != "constant"


def _scalers(megatron: Megatron) -> list[Any]:
    """Return the optimizers' loss scalers whose scale changes."""
    optimizer = megatron.optimizer
    found = [getattr(one, "grad_scaler", None) for one in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [scaler for scaler in found if scaler is not None and scaler.state_dict()]


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
