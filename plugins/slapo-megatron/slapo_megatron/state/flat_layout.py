"""Locate main weights and states in Megatron's optimizers: all access to their internals.

Imports Megatron: import it in functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer

from slapo_core import BuildError
from slapo_megatron.private import start_of
from slapo_megatron.state.tensors import merge_across_ranks
from slapo_runtime.flat_shards import Place

if TYPE_CHECKING:
    from slapo_core.layout import Mesh


@dataclass(frozen=True)
class Held:
    """This rank's part of one parameter in an optimizer.

    Args:
        inner: the optimizer of torch that steps it.
        place: where; None where other replicas hold all of it.
        dtype: in which it is trained.
        is_part: whether replicas hold parts of it.
        is_copy: whether the optimizer steps another tensor than the parameter, or a part of it.
    """

    inner: torch.optim.Optimizer
    place: Place | None
    dtype: torch.dtype
    is_part: bool = False
    is_copy: bool = False


@dataclass
class Places:
    """Those of an engine.

    Args:
        held: by the identity of the parameter; of all that an optimizer of Megatron trains on this rank.
        groups: for each group of each optimizer of torch, that one, the group's number there, and the parameters of the
            model in it, those of which other replicas hold all too.
        order: the parameters that are views of Megatron's communication buffers, in an order that replicas
            share.
        shared: the process groups over which parts lie: the replicas are the product of these.
    """

    held: dict[int, Held] = field(default_factory=dict)
    groups: list[tuple[torch.optim.Optimizer, int, list[torch.Tensor]]] = field(default_factory=list)
    order: list[torch.Tensor] = field(default_factory=list)
    shared: list[Any] = field(default_factory=list)

    @property
    def inner(self) -> list[torch.optim.Optimizer]:
        """The optimizers of torch, each once."""
        return list({id(inner): inner for inner, _, _ in self.groups}.values())


def places_of(optimizer: Any, mesh: Mesh | None) -> Places:
    """Locate the main weights of Megatron's optimizer: a collective over its replicas.

    Args:
        optimizer: None where nothing is trained.
        mesh: of the schedule.

    Raises:
        BuildError: an optimizer of Megatron that we do not know, or whose state is not where it could be read.
    """
    places = Places()
    if optimizer is None:
        return places
    for one in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]:
        if one.optimizer is None:
            continue  # there is nothing to train on this rank
        is_offloaded = isinstance(one.optimizer, HybridDeviceOptimizer)
        if is_offloaded or one.config.use_precision_aware_optimizer:
            option = "optimizer_cpu_offload" if is_offloaded else "use_precision_aware_optimizer"
            raise BuildError(
                f"what Megatron's optimizer keeps with '{option}' is unknown: it could not be saved",
                hint=f'optimizer_config={{"{option}": False}}',
            )
        if isinstance(one, DistributedOptimizer):
            _distributed(one, places, mesh)
        elif isinstance(one, Float16OptimizerWithFloat16Params):
            _whole(one, places, dict(_copies(one)))
        elif isinstance(one, FP32Optimizer):
            _whole(one, places, {})
        else:
            kind = type(one).__name__
            raise BuildError(
                f"where Megatron's {kind} keeps its main weights is unknown: they could not be saved",
                hint="use Adam or SGD, with the distributed optimizer or without",
            )
    return places


def _copies(one: Float16OptimizerWithFloat16Params) -> Iterator[tuple[int, torch.Tensor]]:
    """The identity of each main parameter, and the one of the model."""
    for parameters, mains in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
        for parameter, main in zip(parameters, mains, strict=True):
            yield id(main), parameter


def _whole(one: Any, places: Places, copies: dict[int, torch.Tensor]) -> None:
    """Every replica steps a tensor of the parameter's shape, or the parameter itself."""
    for number, group in enumerate(one.optimizer.param_groups):
        parameters = []
        for stepped in group["params"]:
            parameter = copies.get(id(stepped), stepped)
            parameters.append(parameter)
            if parameter.requires_grad:
                place, is_copy = Place.whole(stepped, tuple(parameter.shape)), parameter is not stepped
                places.held[id(parameter)] = Held(one.optimizer, place, stepped.dtype, is_copy=is_copy)
        places.groups.append((one.optimizer, number, parameters))


def _distributed(one: DistributedOptimizer, places: Places, mesh: Mesh | None) -> None:
    """Replicas hold equal parts of flat buffers; one that holds no element of a parameter knows nothing of it."""
    is_part = one.data_parallel_group.size() > 1
    groups = [mesh.group("dp")] if mesh is not None and mesh.size("dp") > 1 else []
    if math.prod(group.size() for group in groups if group is not None) != one.data_parallel_group.size():
        groups = [one.data_parallel_group]  # several instances of the optimizer, each sharded separately
    places.shared = groups if is_part else []
    order = [parameter for buffer in one.buffers for parameter in buffer.param_index_map]
    places.order += order
    number_of = {id(parameter): number for number, parameter in enumerate(order)}
    group_of: dict[int, int] = {}
    for parameters_of_groups, parts_of_groups in (
        (one.model_float16_groups, one.shard_fp32_from_float16_groups),
        (one.model_fp32_groups, one.shard_fp32_groups),
    ):
        for number, (parameters, parts) in enumerate(zip(parameters_of_groups, parts_of_groups, strict=True)):
            for parameter, part in zip(parameters, parts, strict=True):
                offset = start_of(one, parameter)
                place = Place(part, 0, offset, part.numel(), tuple(parameter.shape))
                is_copy = is_part or part.dtype != parameter.dtype
                places.held[id(parameter)] = Held(one.optimizer, place, part.dtype, is_part, is_copy)
                group_of[number_of[id(parameter)]] = number
    group_of = merge_across_ranks(group_of, places.shared)
    for number in range(len(one.optimizer.param_groups)):
        inside = [parameter for at, parameter in enumerate(order) if group_of.get(at) == number]
        places.groups.append((one.optimizer, number, inside))
        for parameter in inside:
            places.held.setdefault(id(parameter), Held(one.optimizer, None, torch.float32, True, True))
