"""`estimate`: memory, communication and time of a training step, before anything runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from slapo_core.errors import ArgumentError, LaunchError, SlapoError
from slapo_core.layout import Mesh, check_sizes
from slapo_estimate.device import DeviceSpec
from slapo_estimate.results import Estimate
from slapo_estimate.source import Functions, ScheduleSource, of_schedule, require_sendable, sendable_batch
from slapo_runtime.launcher import preload_modules, run_process

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_estimate.simulation import RankResult, Request

Optimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Loss: TypeAlias = Callable[[Any, Any], torch.Tensor]
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Hides GPUs from a simulation, for which DeepSpeed and Megatron would compile kernels. HIP reads it, too."""

_FUNCTIONS = "estimate_functions(make_model, schedule, batch, optimizer=..., mesh=...)"


def estimate(
    schedule: Schedule,
    example_inputs: Any = None,
    *,
    optimizer: Optimizer | None = None,
    mesh: Mapping[str, int] | Mesh | None = None,
    rank: int | None = None,
    loss: Loss | None = None,
    device: DeviceSpec | None = None,
    accumulate: int = 1,
    target: str = "torch",
    timeout: float = 600.0,
    **config: Any,
) -> Estimate:
    """Predict memory, communication and time of a training step on one CPU process.

    The mesh may have any size. A process for each kind of rank repeats the schedule's steps on the reference model with
    fake tensors, and takes two training steps as ``target`` does. The schedule and its model stay unchanged.

    Args:
        schedule: the schedule, not sealed.
        example_inputs: one batch, as ``train_step`` takes it; its tensors may be on the meta device. Models branch on
            the integers of a batch (masks): give them values. Default: the schedule's example inputs.
        optimizer: as for :func:`slapo_core.build`, at the top level of a module or a ``functools.partial``; None for
            no optimizer.
        mesh: sizes; default: the schedule's mesh.
        rank: one global rank; default: one of each kind of rank.
        loss: as for :func:`slapo_core.build`.
        device: by which time is predicted; None predicts no time. Products of float32 count as TF32 if torch is set to
            use it (``torch.set_float32_matmul_precision("high")``) and the device has ``"tf32"``.
        accumulate: micro-batches of a step, as for :func:`slapo_core.build`.
        target: the dialect; other dialects than ``"torch"`` run their own engine, if it can run on fake tensors.
        timeout: seconds for each kind of rank.
        config: options of the target, as for :func:`slapo_core.build`, and its further arguments: for ``"torch"``, e.g.
            ``data_parallel="fsdp"``, ``precision="bf16-mixed"``; with several ranks along ``pp`` options of the
            dialect and ``max_grad_norm`` alone, e.g. ``microbatches=8``, ``pipeline_schedule="1f1b"``.

    Raises:
        ArgumentError: an argument is invalid, or a batch is missing.
        MeshError: sizes are invalid.
        SealedError: the schedule dropped its reference model.
        SerializationError: a step, the optimizer or the loss cannot be sent to another process.
        LaunchError: the model cannot be sent to another process.
        ReplayError: a step is refused on the mesh.
        EstimateError: the model reads unknown values, or the step raises.
        BuildError: the target cannot run the schedule, or cannot simulate a step.
    """
    from slapo_core import Schedule

    if not isinstance(schedule, Schedule):
        raise ArgumentError(
            f"estimate takes a schedule (got {type(schedule).__name__})",
            hint="slapo.estimate(slapo.create_schedule(model), batch)",
        )
    sizes = mesh if mesh is not None else schedule.mesh.sizes if schedule.mesh is not None else None
    batch = schedule.example_inputs if example_inputs is None else example_inputs
    _require_batch(batch, "sch.estimate({'input_ids': ids, 'labels': ids}, optimizer=...)")
    return estimate_source(
        of_schedule(schedule),
        batch,
        mesh=sizes,
        rank=rank,
        optimizer=optimizer,
        loss=loss,
        device=device,
        accumulate=accumulate,
        target=target,
        timeout=timeout,
        **config,
    )


def estimate_functions(
    make_model: Callable[[], nn.Module],
    schedule: Callable[..., Any],
    example_inputs: Any,
    *,
    arguments: tuple[Any, ...] = (),
    **options: Any,
) -> Estimate:
    """Estimate a schedule that each process makes by functions: only their names are sent.

    Args:
        make_model: returns the model, at the top level of a module; called under ``torch.device("meta")``.
        schedule: applies steps to the default schedule, given ``arguments``; at the top level of a module.
        example_inputs: see :func:`estimate`.
        arguments: further arguments of ``schedule``.
        options: the keyword arguments of :func:`estimate`; without ``mesh`` one rank is estimated.

    Raises:
        ArgumentError: an argument is invalid, or a batch is missing.
        SerializationError: a function cannot be sent by its name.
        SlapoError: see :func:`estimate`; or raised by ``schedule``.
    """
    for name, function in (("make_model", make_model), ("schedule", schedule)):
        if not callable(function):
            raise ArgumentError(f"{name} must be a function (got {type(function).__name__})", hint=_FUNCTIONS)
        require_sendable(name, function, f"{name}=a function")
    require_sendable("arguments", arguments, "arguments=plain values")
    _require_batch(example_inputs, _FUNCTIONS)
    return estimate_source(Functions(make_model, schedule, tuple(arguments)), example_inputs, **options)


def estimate_source(
    source: ScheduleSource,
    batch: Any,
    *,
    mesh: Mapping[str, int] | Mesh | None = None,
    rank: int | None = None,
    optimizer: Optimizer | None = None,
    loss: Loss | None = None,
    device: DeviceSpec | None = None,
    accumulate: int = 1,
    target: str = "torch",
    timeout: float = 600.0,
    observer: Callable[..., Any] | None = None,
    **config: Any,
) -> Estimate:
    """Estimate a schedule that each process makes by a source.

    Args:
        source: makes the schedule.
        batch: see :func:`estimate`.
        mesh: see :func:`estimate`; None for one rank without a mesh.
        rank: see :func:`estimate`.
        optimizer: see :func:`estimate`.
        loss: see :func:`estimate`.
        device: see :func:`estimate`.
        accumulate: see :func:`estimate`.
        target: see :func:`estimate`.
        timeout: see :func:`estimate`.
        observer: see :class:`~slapo_estimate.simulation.Request`.
        config: see :func:`estimate`.
    """
    sizes = _sizes(mesh)
    if device is not None and not isinstance(device, DeviceSpec):
        raise ArgumentError(
            f"device must be a DeviceSpec (got {type(device).__name__})",
            hint="device=slapo_core.DeviceSpec(name, flops=..., bandwidth=..., launch=...), e.g. of `slapo device "
            "measure`; device=None predicts no time",
        )
    _check(sizes, rank, optimizer, loss, accumulate)
    device = None if device is None else _as_set(device)
    from slapo_estimate.pipeline_step import with_waiting
    from slapo_estimate.simulation import Request  # with torch's fake tensors, which are slow to import

    request = Request(
        source,
        sizes,
        rank or 0,
        (rank or 0,),
        sendable_batch(batch),
        optimizer,
        loss,
        device,
        accumulate,
        observer,
        config,
        target,
    )
    result = _simulated(request, timeout)
    if rank is not None:
        own_kind = next(ranks for ranks in result.kinds if rank in ranks)
        return Estimate(dict(sizes or {}), (dataclasses.replace(result.estimate, ranks=own_kind),), result.assumptions)
    kinds = [dataclasses.replace(result.estimate, ranks=result.kinds[0])]
    for ranks in result.kinds[1:]:
        another = dataclasses.replace(request, rank=ranks[0], ranks=ranks)
        kinds.append(_simulated(another, timeout).estimate)
    return Estimate(dict(sizes or {}), with_waiting(kinds, result.waits), result.assumptions)


def _as_set(device: DeviceSpec) -> DeviceSpec:
    """Use the device's TF32 rate for float32 if torch multiplies in TF32."""
    if "tf32" not in device.flops or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return device
    return dataclasses.replace(device, flops={**device.flops, "float32": device.flops["tf32"]})


def _simulated(request: Request, timeout: float) -> RankResult:
    preload_modules("slapo_estimate.simulation")
    from slapo_estimate.simulation import simulate

    try:
        result = run_process(simulate, request, timeout=timeout, environment=_NO_GPU)
    except LaunchError as error:
        raise LaunchError(
            f"estimate simulates each kind of rank in another process: {error.message}",
            hint=f"{error.hint}; or {_FUNCTIONS}" if error.hint else _FUNCTIONS,
        ) from error
    if isinstance(result, SlapoError):
        raise result
    return result


def _sizes(mesh: Mapping[str, int] | Mesh | None) -> dict[str, int] | None:
    if mesh is None:
        return None
    sizes = mesh.sizes if isinstance(mesh, Mesh) else mesh
    if not isinstance(sizes, Mapping):
        raise ArgumentError(
            f"mesh must be a dictionary of sizes (got {type(mesh).__name__})", hint='mesh={"dp": 16, "tp": 8}'
        )
    check_sizes(sizes)
    return dict(sizes)


def _require_batch(batch: Any, call: str) -> None:
    if batch is None:
        raise ArgumentError(
            "estimate needs one batch: example_inputs was not given, and the schedule has none",
            hint=f"{call}; its tensors may be on the meta device",
        )


def _check(sizes: Mapping[str, int] | None, rank: int | None, optimizer: Any, loss: Any, accumulate: int) -> None:
    world_size = math.prod((sizes or {}).values())
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size):
        raise ArgumentError(
            f"rank must be a rank from 0 to {world_size - 1} of the mesh {dict(sizes or {})} (got {rank!r})",
            hint=f"rank={world_size - 1}, or rank=None for one rank of each kind",
        )
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ArgumentError(
            f"accumulate must be a positive number of micro-batches (got {accumulate!r})", hint="accumulate=1"
        )
    adam = "optimizer=functools.partial(torch.optim.AdamW, lr=1e-4)"
    if optimizer is not None and (isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)):
        raise ArgumentError(
            f"optimizer must be a function of the parameters (got {type(optimizer).__name__})", hint=adam
        )
    if loss is not None and not callable(loss):
        raise ArgumentError(f"loss must be a function of output and batch (got {type(loss).__name__})", hint="loss=f")
    require_sendable("optimizer", optimizer, adam)
    require_sendable("loss", loss, "loss=compute_loss")
