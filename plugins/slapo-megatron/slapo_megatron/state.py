"""Weights, optimizer state and checkpoints under Megatron: where its optimizers keep each parameter.

Imports Megatron: import it in functions.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from slapo_core import BuildError
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
class Kept:
    """What Megatron's optimizers keep of an engine's parameters on this rank.

    Args:
        held: by the identity of the parameter; of all that an optimizer of Megatron trains.
        groups: for each group of each optimizer of torch, that one, the group's number there, and the parameters of the
            model in it, those of which other replicas hold everything too.
        order: the parameters that are views of Megatron's communication buffers, in an order that replicas share.
        shared: the process groups over which parts lie: the replicas are the product of these.
        limit: why this state cannot be saved by the names of the reference model; empty where it can.
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


def kept_by(optimizer: Any, mesh: Mesh | None) -> Kept:
    """Locate the main weights of Megatron's optimizer: a collective over its replicas.

    Args:
        optimizer: None where nothing is trained.
        mesh: of the schedule.
    """
    kept = Kept()
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
    """Why the state of an optimizer of Megatron's cannot be expressed; empty where it can."""
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
    """The identity of each main parameter, and the parameter of the model."""
    for parameters, mains in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
        for parameter, main in zip(parameters, mains, strict=True):
            yield id(main), parameter


def _replicated(one: Any, kept: Kept, copies: dict[int, torch.Tensor]) -> None:
    """Every replica steps a tensor of the parameter's shape, or the parameter itself."""
    for number, group in enumerate(one.optimizer.param_groups):
        parameters = [copies.get(id(stepped), stepped) for stepped in group["params"]]
        for stepped, parameter in zip(group["params"], parameters, strict=True):
            if not stepped.is_contiguous():
                kept.limit = f"a parameter of shape {tuple(stepped.shape)} is not contiguous, and its moments neither"
            elif parameter.requires_grad:
                place = FlatShard.full(stepped, tuple(parameter.shape))
                kept.held[id(parameter)] = StoredParameter(place, dtype=stepped.dtype, optimizer=one.optimizer)
        kept.groups.append((one.optimizer, number, parameters))


def _partitioned(one: DistributedOptimizer, kept: Kept, mesh: Mesh | None) -> None:
    """Replicas hold equal parts of flat buffers; one that holds no element of a parameter knows nothing of it."""
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
"""Settings of Megatron's own groups that belong to its scheduler: a checkpoint holds those of the optimizer only."""

_MADE_BY_MEGATRON = "wd_mult"  # which each of them has

_FUSED = ("lr", "betas", "eps", "weight_decay")  # settings that a fused Adam shares with torch's
_STEP = "step"


def counts_in_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer counts its steps once for each group: the fused Adam of Transformer Engine and of Apex."""
    return type(optimizer).__name__ == "FusedAdam"


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The class of torch that computes the same."""
    if not counts_in_groups(optimizer):
        return type(optimizer).__name__
    return "AdamW" if getattr(optimizer, "adam_w_mode", True) else "Adam"


def settings_of(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Those of the values, live or loaded, that belong to a checkpoint.

    In the groups of a factory all do: there, ``max_lr`` is of torch's OneCycleLR.
    """
    if counts_in_groups(optimizer):
        return {key: values[key] for key in _FUSED if key in values}
    is_own = _MADE_BY_MEGATRON in group
    return {
        key: one for key, one in values.items() if key != "params" and not (is_own and _OF_THE_BUILD.fullmatch(key))
    }


class StoredOptimizer(FlatOptimizer):
    """The optimizer by the parameters of the model, as it is now.

    Args:
        kept: by Megatron's optimizers.
        storage: where parameters lie.
        names: of the parameters, by identity, for messages.
        is_scheduled: whether a scheduler of Megatron sets rates and decays.
    """

    def __init__(self, kept: Kept, storage: FlatStorage, names: Mapping[int, str], *, is_scheduled: bool) -> None:
        self._live = [(inner, inner.param_groups[number]) for inner, number, _ in kept.groups]
        groups = [
            StoredGroup(parameters, settings_of(inner, group, group))
            for (inner, group), (_, _, parameters) in zip(self._live, kept.groups, strict=True)
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


# -- changes between steps -------------------------------------------------------------------------------------------


class BetweenMegatronSteps(StepInvariants):
    """Refuse changes of the parameters, and of where they lie in Megatron's buffers.

    Args:
        context: of the build.
        kept: by Megatron's optimizers.
        tensors: compares the forward's parameters with their main weights.
    """

    def __init__(self, context: BuildContext, kept: Kept, tensors: FlatTensors) -> None:
        super().__init__(context, tensors, "Megatron", partitioned=bool(kept.shared))
        in_buffers = {id(parameter) for parameter in kept.order}
        self._addresses = {id(one): one.data_ptr() for one in self._tensors if id(one) in in_buffers}

    def check(self) -> list[LiveTensor]:
        written = super().check()
        for live in written:
            if live.tensor.data_ptr() != self._addresses.get(id(live.tensor), live.tensor.data_ptr()):
                raise BuildError(
                    f"'{live.name}' got other memory after the build (parameter.data = ...): the model no longer uses "
                    "Megatron's buffer",
                    hint="write into it: parameter.data.copy_(values); " + REBUILD,
                )
        return written

    def stamps(self) -> list[Any]:
        """Also others where parameters got other memory."""
        return list(zip(super().stamps(), [tensor.data_ptr() for tensor in self._tensors], strict=True))

    def steps_frozen(self, live: LiveTensor) -> bool:
        """Always: what Megatron steps by is its own buffer of gradients."""
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
    """List the entries of a checkpoint's extra state that an engine uses."""
    there = {SCHEDULER: megatron.scheduler is not None, SCALERS: bool(_scalers(megatron)), COUNTERS: True}
    return [name for name, is_there in there.items() if is_there]


def write_extra_state(megatron: Megatron, found: Mapping[str, Any], loaded: Sequence[Mapping[str, Any]]) -> None:
    """Resume the scheduler and the loss scales from what :func:`read_extra_state` gave; warn of what differs.

    Args:
        megatron: its objects.
        found: of the checkpoint.
        loaded: the settings of the optimizer's groups in the checkpoint.

    Raises:
        BuildError: the scheduler has other settings than that of the checkpoint, and was told to refuse that.
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
        warnings.warn(
            "the checkpoint holds no state of Megatron's scheduler: OptimizerParamScheduler goes on from step "
            f"{scheduler.num_steps}, and sets rates and decays by it",
            stacklevel=5,
        )
    scheduler.step(0)
    different = [
        f"{key} of group {number} = {group[key]:g}, and not {float(settings[key]):g}"
        for number, (group, settings) in enumerate(zip(scheduler.optimizer.param_groups, loaded, strict=True))
        for key in ("lr", "weight_decay")
        if key in settings and not math.isclose(group[key], float(settings[key]), rel_tol=1e-9)
    ]
    if different:
        warnings.warn(
            "Megatron's scheduler sets other values than the checkpoint had: " + "; ".join(different), stacklevel=5
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
            for name, before in rates.items():  # a group has its own, of the same configuration
                if group.get(name) == before:
                    group[name] = getattr(scheduler, name)
        warnings.warn(
            f"Megatron's scheduler goes on with {shown}, as the checkpoint has it; {_OWN} keeps its own",
            stacklevel=6,
        )


def _depends_on_steps(scheduler: Any) -> bool:
    rates = scheduler.lr_decay_style != "constant" or scheduler.lr_warmup_steps > 0
    return rates or scheduler.wd_incr_style != "constant"


def _scalers(megatron: Megatron) -> list[Any]:
    """Those whose scale changes, of each optimizer."""
    optimizer = megatron.optimizer
    found = [getattr(one, "grad_scaler", None) for one in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [scaler for scaler in found if scaler is not None and scaler.state_dict()]


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
