"""The effects of target ``"torch"``: collectives of its own in a training step, for receipts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.effects import Collective
from slapo_runtime.planning import at_modules, stage_messages
from slapo_torch.data_options import data_ranks, gathered_units
from slapo_torch.precision import ModelPrecision, dtype_name

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.effects import Effect

_INEXACT = ("mixed_precision", "static_graph", "delay_all_reduce_named_params")
"""Options of DistributedDataParallel with other types or further exchanges."""


def effects_of(schedule: Schedule, options: Mapping[str, Any]) -> Iterator[Effect]:
    """Yield the messages of stages, and the exchanges of replicas or of ranks that share parameters.

    Args:
        schedule: to build.
        options: of the plan.
    """
    mesh = schedule.mesh
    if mesh is None or mesh.is_abstract:
        return
    pp = mesh.size("pp")
    yield from stage_messages(mesh)
    if data_ranks(mesh) == 1:
        return
    precision = ModelPrecision(schedule, options, torch.device("cpu"))
    if options["data_parallel"] == "ddp":
        yield from _averages(schedule, precision, options) if pp == 1 else _of_stages(schedule, precision, "all_reduce")
    elif pp > 1:
        yield from _of_stages(schedule, precision, "all_gather")
        yield from _of_stages(schedule, precision, "reduce_scatter")
    else:
        yield from _of_units(schedule, precision, options)


def _stored(precision: ModelPrecision, name: str, tensor: torch.Tensor) -> torch.dtype:
    return precision.stored(name) if precision.preset is not None and tensor.is_floating_point() else tensor.dtype


def _computed(precision: ModelPrecision, name: str, tensor: torch.Tensor) -> torch.dtype:
    lowers = precision.gathers and tensor.is_floating_point()
    return precision.computed(name) if lowers else _stored(precision, name, tensor)


def _only(dtypes: set[torch.dtype]) -> str | None:
    return dtype_name(next(iter(dtypes))) if len(dtypes) == 1 else None


def _averages(schedule: Schedule, precision: ModelPrecision, options: Mapping[str, Any]) -> Iterator[Collective]:
    """Yield the exchange of DistributedDataParallel, of each gradient once in a step."""
    trained = {name: one for name, one in schedule.model.named_parameters() if one.requires_grad}
    if not trained:
        return
    is_sparse = any(getattr(module, "sparse", False) for module in schedule.model.modules())
    ignores = hasattr(schedule.model, "_ddp_params_and_buffers_to_ignore")
    if is_sparse or ignores or any(options.get(name) for name in _INEXACT):
        yield Collective("all_reduce", "dp", "step")
        return
    dtypes = {name: _stored(precision, name, one) for name, one in trained.items()}
    size = sum(one.numel() * dtypes[name].itemsize for name, one in trained.items())
    yield Collective("all_reduce", "dp", "step", dtype=_only(set(dtypes.values())), bytes=size)


def _of_stages(schedule: Schedule, precision: ModelPrecision, kind: str) -> Iterator[Collective]:
    """Yield the exchange of the parameters of a pipeline rank, at each module with some: a rank has a part of them."""
    read = _computed if kind == "all_gather" else _stored
    held = {name: one for name, one in schedule.model.named_parameters() if one.requires_grad or kind == "all_gather"}
    dtype = _only({read(precision, name, one) for name, one in held.items()})
    yield from at_modules(Collective(kind, "dp", "step", dtype=dtype), held)


def _of_units(schedule: Schedule, precision: ModelPrecision, options: Mapping[str, Any]) -> Iterator[Collective]:
    """Yield the collectives of each unit of ``fully_shard``."""
    mesh = schedule.mesh
    assert mesh is not None
    for path, unit in gathered_units(schedule, options):
        dtypes = {_computed(precision, name, one) for name, one in unit.parameters.items()}
        gathered = _only(dtypes)
        yield Collective("all_gather", "dp", "forward", 1, gathered, at=path)
        if unit.is_gathered_again:
            times = None if type(unit.reshard) is int else 1  # of another group, unless it is the number of all ranks
            yield Collective("all_gather", "dp", "backward", times, gathered, at=path)
        trained = {name: one for name, one in unit.parameters.items() if one.requires_grad}
        if trained:
            reduced = _only({_stored(precision, name, one) for name, one in trained.items()})
            yield Collective("reduce_scatter", "dp", "step", 1, reduced, at=path)
            if mesh.size("dp_replicate") > 1:
                yield Collective("all_reduce", "dp_replicate", "step", 1, reduced, at=path)
