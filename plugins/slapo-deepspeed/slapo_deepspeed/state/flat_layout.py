"""Locate main weights and states in DeepSpeed's optimizers: all access to their internals.

DeepSpeed documents functions that give one parameter whole (``deepspeed.utils.safe_get_full_fp32_param`` and others),
but none before the first step, none for an optimizer without ZeRO, and none that works after ``engine.destroy()``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import BuildError
from slapo_deepspeed.private import link_optimizer_state, partition_rank
from slapo_runtime.flat_shards import Place

if TYPE_CHECKING:
    from slapo_runtime.flat_shards import Place


@dataclass(frozen=True)
class Places:
    """Those of an engine.

    Args:
        by_parameter: of every parameter whose trained values are another tensor than the parameter, by identity.
        are_parts: whether replicas hold parts; else each holds them all.
        inner: the optimizer that computes; None where there is none.
        wrapper: DeepSpeed's around it, or itself.
    """

    by_parameter: dict[int, Place]
    are_parts: bool
    inner: torch.optim.Optimizer | None
    wrapper: Any

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """That of now: DeepSpeed replaces some by others of its own."""
        return getattr(self.wrapper, "optimizer", self.inner) if self.wrapper is not self.inner else self.inner

    def link(self) -> None:
        """Let DeepSpeed's own functions find a state that came into the optimizer from outside."""
        if self.inner is not None:
            link_optimizer_state(self.wrapper, self.optimizer)


def places_of(engine: Any) -> Places:
    """Locate the main weights of DeepSpeed's engine, once it is ready to train.

    Raises:
        BuildError: an optimizer of DeepSpeed that we do not know, or whose state is not in memory.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    inner, wrapper = engine.basic_optimizer, engine.optimizer
    if inner is None:
        return Places({}, False, None, None)
    if wrapper is inner:
        return Places({}, False, inner, inner)
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        return Places(dict(_stage_3(wrapper)), True, inner, wrapper)
    if isinstance(wrapper, DeepSpeedZeroOptimizer):
        return Places(dict(_stages_1_and_2(wrapper)), True, inner, wrapper)
    if isinstance(wrapper, BF16_Optimizer):
        return Places(dict(_bfloat16(wrapper)), True, inner, wrapper)
    if isinstance(wrapper, FP16_Optimizer):
        return Places(dict(_consecutive(wrapper.fp16_groups, wrapper.fp32_groups_flat)), False, inner, wrapper)
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        return Places(dict(_one_by_one(wrapper.fp16_groups, wrapper.fp32_groups)), False, inner, wrapper)
    raise BuildError(
        f"where DeepSpeed's {type(wrapper).__name__} keeps its main weights is unknown: they could not be saved",
        hint="use ZeRO, or an optimizer of torch",
    )


def shape_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """The whole shape, also where ZeRO-3 holds a part."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def partition_of(parameter: torch.Tensor, rank: int) -> tuple[torch.Tensor, int] | None:
    """Return this rank's elements of a ZeRO-3 parameter, and the offset of the first one.

    None for a tensor that it does not partition.

    Args:
        parameter: of the model.
        rank: this replica's.
    """
    held = getattr(parameter, "ds_tensor", None)
    if held is None:
        return None
    if held.numel() < held.ds_numel:
        raise BuildError(
            "ZeRO-3 keeps parameters in files, from where they are not read here",
            hint="engine.deepspeed.save_checkpoint(directory) saves them",
        )
    offset = rank * held.ds_numel
    length = min(held.ds_numel, max(0, math.prod(shape_of(parameter)) - offset))
    return held.detach().view(-1).narrow(0, 0, length), offset


def _stages_1_and_2(wrapper: Any) -> Iterator[tuple[int, Place]]:
    """Groups are flat, in an order of DeepSpeed's, and replicas hold equal parts of them."""
    for number, flat in enumerate(wrapper.single_partition_of_fp32_groups):
        parameters, starts = wrapper.round_robin_bit16_groups[number], wrapper.round_robin_bit16_offsets[number]
        rank = _rank(wrapper.real_dp_process_group[number])
        for parameter, start in zip(parameters, starts, strict=True):
            yield id(parameter), _fragment(parameter, start, flat, rank * wrapper.partition_size[number])


def _bfloat16(wrapper: Any) -> Iterator[tuple[int, Place]]:
    """ZeRO-1's optimizer for bfloat16: as above, in the order of the group."""
    for number, flat in enumerate(wrapper.fp32_groups_flat_partition):
        begin = _rank(wrapper.real_dp_process_group[number]) * flat.numel()
        start = 0
        for parameter in wrapper.bf16_groups[number]:
            yield id(parameter), _fragment(parameter, start, flat, begin)
            start += parameter.numel()


def _fragment(parameter: torch.Tensor, start: int, flat: torch.Tensor, begin: int) -> Place:
    """Return the part of a parameter, at ``start`` in its group, that lies in the shard from ``begin`` on."""
    first, last = max(start, begin), min(start + parameter.numel(), begin + flat.numel())
    if first >= last:
        return Place(flat, 0, 0, 0, shape_of(parameter))
    return Place(flat, first - begin, first - start, last - first, shape_of(parameter))


def _rank(group: Any) -> int:
    import torch.distributed as dist

    return dist.get_rank(group)


def _stage_3(wrapper: Any) -> Iterator[tuple[int, Place]]:
    """ZeRO-3: replicas hold equal parts of every parameter, the last one with padding."""
    if wrapper.swap_optimizer or wrapper.params_in_nvme_and_cpu:
        raise BuildError(
            "ZeRO-3 with its state in files (offload to nvme) cannot be saved and loaded here",
            hint='"device": "cpu" for offload_optimizer and offload_param',
        )
    for parameters in wrapper.fp16_groups:
        for parameter in parameters:
            number, start, size = wrapper.grad_position[wrapper.get_param_id(parameter)]
            shape, offset = shape_of(parameter), partition_rank(wrapper, parameter) * size
            length = min(size, max(0, math.prod(shape) - offset))
            yield id(parameter), Place(wrapper.fp32_partitioned_groups_flat[number], start, offset, length, shape)


def _consecutive(groups: Any, flats: Any) -> Iterator[tuple[int, Place]]:
    """Main weights of a group in one flat tensor, without ZeRO."""
    for parameters, flat in zip(groups, flats, strict=True):
        start = 0
        for parameter in parameters:
            yield id(parameter), Place(flat, start, 0, parameter.numel(), shape_of(parameter))
            start += parameter.numel()


def _one_by_one(groups: Any, main_weights: Any) -> Iterator[tuple[int, Place]]:
    """A master for each parameter, without ZeRO."""
    for parameters, own in zip(groups, main_weights, strict=True):
        for parameter, master in zip(parameters, own, strict=True):
            yield id(parameter), Place(master, 0, 0, parameter.numel(), shape_of(parameter))


_SHOWN = 4  # names in a message
_NUMBERS = ("step", "mu_product", "eta", "mu")  # of torch's optimizers, also where a parameter is a single number


def flat_states(
    optimizer: torch.optim.Optimizer,
    places: Mapping[int, Place],
    parameters: Iterable[torch.Tensor],
    states: Mapping[torch.Tensor, Mapping[str, Any]],
    names: Mapping[int, str],
) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """For each flat tensor, its new state; an empty one where no parameter in it has any. Nothing is changed.

    Args:
        optimizer: that steps them.
        places: of parameters in flat tensors, by identity.
        parameters: all of the optimizer.
        states: of those that have one; each is read once, one after the other.
        names: of parameters, for messages.

    Raises:
        BuildError: parameters in one flat tensor are to have different numbers of steps, or tensors of another shape.
    """
    by_flat: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    for parameter in parameters:
        place = places.get(id(parameter))
        if place is not None:
            by_flat.setdefault(id(place.flat), (place.flat, []))[1].append(parameter)
    return [
        (flat, _state_of(flat, optimizer.state.get(flat, {}), inside, places, states, names))
        for flat, inside in by_flat.values()
    ]


def _state_of(
    flat: torch.Tensor,
    before: Mapping[str, Any],
    parameters: list[torch.Tensor],
    places: Mapping[int, Place],
    states: Mapping[torch.Tensor, Mapping[str, Any]],
    names: Mapping[int, str],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    said: dict[str, str] = {}  # which parameter gave a value that all of them share
    lacking = [names[id(one)] for one in parameters if one not in states]
    if len(lacking) == len(parameters):
        return {}
    for parameter in parameters:
        place, name = places[id(parameter)], names[id(parameter)]
        for key, value in states.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and (value.dim() or (not place.shape and key not in _NUMBERS)):
                if tuple(value.shape) != place.shape:
                    raise BuildError(
                        f"the checkpoint has '{key}' of shape {tuple(value.shape)} for '{name}' of shape "
                        f"{place.shape}: DeepSpeed keeps only tensors of the parameter's shape"
                    )
                if not isinstance(found.get(key), torch.Tensor):
                    found[key] = torch.zeros_like(flat, requires_grad=False)
                place.of(found[key]).copy_(place.part(value))
            elif key not in said:
                said[key] = name
                if not (value is None and isinstance(found.get(key), torch.Tensor)):
                    found[key] = _placed(value, before.get(key))
            elif value is not None and not _equal(found.get(key), value):
                raise BuildError(
                    f"the checkpoint has '{key}' = {_shown(found[key])} for '{said[key]}' and {_shown(value)} for "
                    f"'{name}', and DeepSpeed keeps one number for both",
                    hint="put them into groups of their own in the optimizer's factory, or use ZeRO 0",
                )
    if lacking:
        shown = ", ".join(lacking[:_SHOWN]) + (f" and {len(lacking) - _SHOWN} more" if lacking[_SHOWN:] else "")
        warnings.warn(
            f"the checkpoint has no state of the optimizer for {shown}, which were not trained before: DeepSpeed gives "
            "them zeros, and the number of steps of the others",
            stacklevel=2,
        )
    return found


def _placed(value: Any, before: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(before.device, before.dtype) if isinstance(before, torch.Tensor) else value.clone()
    return value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and one.dim():
        return False
    return one is not None and float(one) == float(other)


def _shown(value: Any) -> str:
    return str(value.item() if isinstance(value, torch.Tensor) and not value.dim() else value)
