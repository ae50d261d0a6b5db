"""Simulate one rank in a process: a fake process group, fake tensors, two training steps."""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import logging
import math
import os
import traceback
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core.errors import EstimateError, SlapoError
from slapo_core.internals import Internals, SafeFakeTensorMode, buffers_of, is_data_pointer_error
from slapo_estimate.pipeline_step import pipeline_of, train_stages
from slapo_estimate.private import (
    FakeStore,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    kernels_of_cuda,
    tree_map_only,
)
from slapo_estimate.results import Assumptions, RankEstimate
from slapo_estimate.roofline import TimeTracker
from slapo_estimate.trackers import CollectiveTracker, FlopTracker, OperationObserver, refuse_layout
from slapo_estimate.training_step import train
from slapo_estimate.values import KnownValues, UnknownValueError, is_tracked
from slapo_runtime.correspondence import Correspondence
from slapo_runtime.receipts.attribution import PositionTracker
from slapo_runtime.receipts.collectives import MeshGroups
from slapo_runtime.receipts.memory import MemoryTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from slapo_core import Schedule
    from slapo_estimate.device import DeviceSpec
    from slapo_estimate.source import ScheduleSource


def kinds_of_ranks(mesh: Mapping[str, int] | None) -> tuple[tuple[int, ...], ...]:
    """Group the ranks of a mesh by kind, the kind of rank 0 first.

    Shards are of equal sizes, so only ranks of different pipeline stages differ.
    """
    sizes = dict(mesh or {})
    kinds: dict[int, list[int]] = {}
    for rank, position in enumerate(itertools.product(*(range(size) for size in sizes.values()))):
        kinds.setdefault(dict(zip(sizes, position, strict=True)).get("pp", 0), []).append(rank)
    return tuple(tuple(ranks) for ranks in kinds.values())


_HOME = torch.device("cpu")


def without_memory(schedule: Schedule, mode: FakeTensorMode, values: KnownValues) -> None:
    """Replace the tensors of the scheduled model by fake ones, in place; ties and layouts stay.

    Tensors of other pipeline ranks become placeholders on the meta device.
    """
    correspondence, _ = Correspondence.of(schedule)
    Internals(schedule).tree.tensors.keep_shapes(True)
    edit = Internals(schedule).edit()
    for live in correspondence.live():
        node = Internals(schedule).node(live.path)
        install = edit.set_parameter if live.is_parameter else edit.set_buffer
        install(node, live.own_name, _fake(live.tensor, mode, values) if live.is_local else live.tensor.to("meta"))
    for module in schedule.model.modules():
        for name, buffer in buffers_of(module).items():  # non-persistent buffers
            if buffer is not None and not isinstance(buffer, FakeTensor):
                buffers_of(module)[name] = _fake(buffer, mode, values)


def fake_batch(batch: Any, mode: FakeTensorMode, values: KnownValues, assumptions: Assumptions) -> Any:
    """Make a batch of fake tensors; integers without values get ones."""

    def made(tensor: torch.Tensor) -> torch.Tensor:
        fake = _fake(tensor, mode, values)
        if tensor.is_meta and not tensor.is_floating_point() and not tensor.is_complex():
            assumptions.integers_are_one()
            one = torch.ones((), dtype=tensor.dtype)
            values.set_value(
                fake, torch.ones_like(tensor, device="cpu") if is_tracked(tensor) else one.expand(tensor.shape)
            )
        return fake

    return tree_map_only(torch.Tensor, made, batch)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, values: KnownValues) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor.is_meta:
        fake: torch.Tensor = FakeTensor(mode, tensor.detach(), _HOME)
    else:
        fake = mode.from_tensor(tensor.detach(), static_shapes=True)
    if is_tracked(tensor):
        values.copy_value(tensor, fake)
    return fake


_OWN = [
    find_spec(name)
    for name in ("torch", *(f"slapo_{own}" for own in ("core", "estimate", "graph", "runtime", "torch")))
]
_NOT_THE_USERS = tuple(os.path.dirname(str(spec.origin)) + os.sep for spec in _OWN if spec is not None)


def as_slapo_error(error: Exception, *, doing: str, model: nn.Module | None) -> SlapoError:
    """Turn an exception of a simulated step into an error with module and line.

    Args:
        error: raised by the model, by torch, or by the user's functions.
        doing: the phase, e.g. ``"a training step"``.
        model: the trained model; None before it exists.
    """
    if isinstance(error, SlapoError):
        return error
    location, line = _where(error)
    module = _module(error, model) if model is not None else None
    where = f" in module '{module}'" if module else ""
    where += f" (`{line}`)" if line else ""
    if isinstance(error, UnknownValueError):
        return EstimateError(
            f"the model reads values{where} that only real data can provide: {error}",
            path=module,
            hint="integers are known if they follow from a batch or buffer with values: pass a batch that is not on "
            "the meta device; floats are unknown: leave out logging, or make the module independent of values, "
            f"sch['{module or 'path'}'].replace(...)",
            location=location,
        )
    if is_data_pointer_error(error):
        return EstimateError(
            f"the model uses the data pointer of a tensor{where}, which only a real run can provide",
            path=module,
            hint="make the kernel a custom operator with a fake implementation: torch.library.custom_op and "
            "register_fake",
            location=location,
        )
    if isinstance(error, UnsupportedOperatorException):
        return EstimateError(
            f"operator {error.func}{where} has no implementation for fake tensors",
            path=module,
            hint="register it: torch.library.register_fake",
            location=location,
        )
    return EstimateError(
        f"{doing} raised {type(error).__name__}{where}: {error}",
        path=module,
        hint="slapo.verify(sch, batch) tells whether the model itself raises, or which step of the "
        "schedule is to blame; if the model trains on this batch, some torch operator supports fewer dtypes on fake "
        "tensors (e.g. grouped_mm: bfloat16 only)"
        if model is not None
        else None,
        location=location,
    )


def _module(error: Exception, model: nn.Module) -> str | None:
    """Return the path of the innermost module on the traceback."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = paths.get(id(frame.f_locals.get("self")))
        found = path if path is not None else found
    return found


def _where(error: Exception) -> tuple[tuple[str, int] | None, str]:
    """Return the last line of the traceback outside of torch and slapo, and its text."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if os.path.isfile(frame.filename) and not os.path.abspath(frame.filename).startswith(_NOT_THE_USERS):
            return (frame.filename, frame.lineno or 0), linecache.getline(frame.filename, frame.lineno or 0).strip()
    return None, ""


@dataclass(frozen=True)
class Request:
    """The arguments of one rank's process.

    Args:
        source: makes the schedule.
        mesh: sizes; None for one rank without a mesh.
        rank: the global rank to simulate.
        ranks: all ranks of its kind.
        batch: as ``train_step`` takes it; its tensors may be on the meta device.
        optimizer: as for ``build``.
        loss: as for ``build``.
        device: by which time is predicted; None predicts no time.
        accumulate: micro-batches of a step.
        observer: makes a further observer, called last for each operation; the estimate has its ``result()``.
        config: options of the target, as for ``build``.
        target: the dialect whose training step is estimated.
    """

    source: ScheduleSource
    mesh: Mapping[str, int] | None
    rank: int
    ranks: tuple[int, ...]
    batch: Any
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    device: DeviceSpec | None = None
    accumulate: int = 1
    observer: Callable[[Schedule, Trackers], Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    target: str = "torch"


@dataclass(frozen=True)
class RankResult:
    """The result of one rank's process.

    Args:
        estimate: the estimate of the simulated rank.
        kinds: the ranks of the mesh, grouped by kind.
        assumptions: as sentences.
        waits: share of the time of each other rank along ``pp`` that this rank waits.
    """

    estimate: RankEstimate
    kinds: tuple[tuple[int, ...], ...]
    assumptions: tuple[str, ...]
    waits: float = 0.0


@dataclass(frozen=True)
class Trackers:
    """The observers of a rank's steps.

    Args:
        position: module, step and phase of the running operation.
        memory: bytes in use.
        communication: collectives.
        flops: FLOPs of products.
        time: seconds by the roofline; None without a device.
        others: observers that the request adds.
    """

    position: PositionTracker
    memory: MemoryTracker
    communication: CollectiveTracker
    flops: FlopTracker
    time: TimeTracker | None
    others: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, schedule: Schedule, request: Request) -> Trackers:
        position = PositionTracker.of(schedule.model)
        groups = MeshGroups(request.mesh or {}, request.rank)
        communication, flops = CollectiveTracker(position, groups), FlopTracker()
        time = None if request.device is None else TimeTracker(request.device, position, flops, communication)
        trackers = cls(position, MemoryTracker(position, refuse_layout), communication, flops, time)
        if request.observer is not None:
            trackers.others.append(request.observer(schedule, trackers))
        return trackers

    def observers(self) -> tuple[OperationObserver, ...]:
        """Return the observers in the order of their calls."""
        time = () if self.time is None else (self.time,)
        return (self.memory, self.communication, self.flops, *time, *self.others)

    def spent(self) -> tuple[int, float]:
        """Return floating-point operations and seconds of the step so far."""
        return self.flops.total, 0.0 if self.time is None else self.time.seconds

    def begin_step(self) -> None:
        """Begin a step; the estimate is that of the second one."""
        self.position.forget()
        for observer in self.observers():
            observer.begin()

    def result(self, request: Request) -> RankEstimate:
        """Return the estimate of the rank."""
        return RankEstimate(
            request.rank,
            request.ranks,
            self.memory.peak,
            self.flops.total,
            self.communication.collectives,
            None if self.time is None else self.time.seconds,
            observed=next((one.result() for one in self.others), None),
        )


def simulate(request: Request) -> RankResult | SlapoError:
    """Simulate the rank, in a process without process groups; return an error instead of raising it."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it prints exceptions
    doing, model = "making the schedule", None
    try:
        world_size = math.prod(request.mesh.values()) if request.mesh else 1
        if world_size > 1:
            dist.init_process_group("fake", rank=request.rank, world_size=world_size, store=FakeStore())
        schedule = request.source.schedule(request.mesh, request.batch)
        doing = "cutting the batch"
        is_torch = request.target == "torch"
        is_cut = is_torch and schedule.mesh is not None and schedule.mesh.size("pp") > 1
        with _quietly():
            pipeline = pipeline_of(schedule, request) if is_cut else None
        batches = [request.batch] if pipeline is None else pipeline.batches  # an engine cuts the batch itself
        doing = "a training step"
        assumptions = Assumptions()
        assumptions.train(schedule.model)
        assumptions.attention(request.device)
        if not is_torch:
            assumptions.target(request.target)
        elif pipeline is not None:
            replicas = math.prod((request.mesh or {}).get(name, 1) for name in ("dp", "dp_replicate"))
            assumptions.pipeline(
                len(batches),
                request.mesh or {},
                timed=request.device is not None,
                sharded=pipeline.plan.config["data_parallel"] == "fsdp"
                and (replicas > 1 or pipeline.precision.gathers),
            )
        if request.device is not None:
            assumptions.seconds(request.device)
        # DeepSpeed and Megatron compare data pointers of parameters and buckets, here on the CPU: there is no kernel.
        mode = SafeFakeTensorMode() if is_torch else FakeTensorMode(allow_non_fake_inputs=True)
        values = KnownValues(mode)
        without_memory(schedule, mode, values)
        fakes = [fake_batch(batch, mode, values, assumptions) for batch in batches]
        trackers = Trackers.of(schedule, request)
        model = schedule.model
        watched = dataclasses.replace(request, optimizer=assumptions.recording_factory(request.optimizer))
        is_cuda = request.device is not None and request.device.type == "cuda"
        with torch.compiler.set_stance("force_eager"), kernels_of_cuda() if is_cuda else nullcontext():
            if pipeline is None:
                with _quietly():
                    train(schedule, fakes[0], watched, mode, trackers, values, assumptions)
            else:
                values.default = lambda: assumptions.number() if trackers.position.step == "optimizer" else None
                train_stages(schedule, pipeline, fakes, watched, mode, trackers, values)
        waits = pipeline.share if pipeline is not None else 0.0
        return RankResult(trackers.result(request), kinds_of_ranks(request.mesh), assumptions.found(), waits)
    except Exception as error:  # noqa: BLE001 - whatever the user's functions raise
        fault = as_slapo_error(error, doing=doing, model=model)
        fault.__cause__ = fault.__context__ = None  # it is sent to another process
        return fault


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide logs and warnings of a runtime about the simulating process."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def estimate_rank(request: Request) -> RankEstimate:
    """Simulate the rank; raise its error."""
    result = simulate(request)
    if isinstance(result, SlapoError):
        raise result
    return result.estimate
