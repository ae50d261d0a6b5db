"""`fit`: choose the modules to checkpoint, so that a training step fits into memory.

Activation checkpointing trades memory for computing a module's forward a second time (Chen et al., "Training Deep Nets
with Sublinear Memory Cost", 2016). The first blocks of a model keep their activations longest, so they are checkpointed
first, and the peak falls with their number. Bisection finds the smallest number that fits, and estimates each number it
tries. Pipeline stages share no blocks: each has a number of its own, and all are found together.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from slapo_core.errors import ArgumentError, FitError, SealedError
from slapo_core.internals import Checkpoint, Internals, caller_location
from slapo_core.layout import Mesh
from slapo_estimate.blocks import blocks_of
from slapo_estimate.estimates import estimate_source
from slapo_estimate.source import ScheduleSource, of_schedule, require_sendable, sendable_batch
from slapo_runtime.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from slapo_core import Schedule
    from slapo_estimate.device import DeviceSpec
    from slapo_estimate.results import Estimate, Memory
    from slapo_estimate.simulation import Trackers


@dataclass(frozen=True)
class Point:
    """One set of checkpointed blocks, estimated.

    Args:
        paths: paths of the checkpointed blocks.
        peak: bytes of the rank that needs most.
        flops: floating-point operations of a step for recomputation, on all kinds of ranks.
        seconds: seconds of a step by the roofline; None without a device.
    """

    paths: tuple[str, ...]
    peak: int
    flops: int
    seconds: float | None


@dataclass(frozen=True)
class Fit:
    """The result of :func:`slapo_core.fit`: the chosen blocks, and the points that were tried.

    Args:
        paths: paths of the checkpointed modules; empty if the schedule already fitted.
        target: the allowed bytes.
        estimate: estimate of the schedule as it is now.
        before: estimate of the schedule before the call.
        curve: the estimated points, the least peak first; the last point has no checkpointed block.
        estimates: number of estimated kinds of ranks; cached estimates do not count.
    """

    paths: tuple[str, ...]
    target: int
    estimate: Estimate
    before: Estimate
    curve: tuple[Point, ...] = ()
    estimates: int = 0

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most; at most the target."""
        return self.estimate.memory.total

    @property
    def recomputed(self) -> int:
        """Floating-point operations of a step for recomputing the chosen blocks, on all kinds of ranks."""
        return flops_of(self.estimate) - flops_of(self.before)

    def __str__(self) -> str:
        first = f"peak {format_bytes(self.peak)} of {format_bytes(self.target)}"
        if not self.paths:
            return f"{first}: nothing to checkpoint"
        before = flops_of(self.before)
        more = f", {100 * self.recomputed / before:.1f} % more FLOPs" if before else ""
        lines = [
            f"{first}, {format_bytes(self.before.memory.total)} before: {len(self.paths)} checkpointed{more}",
            "  peak       blocks  recomputed",
        ]
        for point in self.curve:
            mark = ">" if point.paths == self.paths else " "
            again = f"{100 * point.flops / before:.1f} %" if before else "-"
            lines.append(f"{mark} {format_bytes(point.peak):<10} {len(point.paths):<7} {again}")
        return "\n".join(lines)


def fit(
    schedule: Schedule,
    memory: int | str,
    example_inputs: Any = None,
    *,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    mesh: Mapping[str, int] | Mesh | None = None,
    offload: bool = False,
    layers: str | Sequence[str] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    device: DeviceSpec | None = None,
    timeout: float = 600.0,
    **config: Any,
) -> Fit:
    """Checkpoint the fewest blocks with which a training step fits into ``memory``.

    The first blocks are checkpointed, as few as each rank needs. The steps are ordinary ``.checkpoint()`` steps at the
    end of the schedule: ``sch.undo(to=...)`` takes them back.
    Checkpointed modules stay so. Bisection over estimates finds the number for each pipeline stage. Limitation: blocks
    of different kinds (T5's encoder and decoder) are not traded against each other: ``layers`` names the first ones.

    Args:
        schedule: the schedule.
        memory: bytes, or e.g. ``"70GiB"``: the peak of a training step, as :class:`slapo_estimate.Memory` counts it.
            Fragmentation and buffers of the runtime are not counted: leave room for them.
        example_inputs: one batch; default: the schedule's example inputs.
        optimizer: as for :func:`slapo_core.build`; None for no optimizer.
        mesh: sizes; default: the schedule's mesh.
        offload: refused: no primitive moves activations to the host.
        layers: modules that may be checkpointed, as paths or globs: ``"encoder.layer.*"``; the first named first.
            Default: the repeated blocks, in the model's order.
        loss: as for :func:`slapo_core.build`.
        device: as for :func:`slapo_core.estimate`; None estimates no time.
        timeout: seconds for each kind of rank, at each estimate.
        config: ``accumulate``, and options of target ``"torch"``, as for :func:`slapo_core.estimate`.

    Raises:
        FitError: nothing fits; the message has the least peak and its tensors.
        ArgumentError: an invalid number, ``offload=True``, or no module can be checkpointed.
        PathError: a path or glob of ``layers`` matches nothing.
    """
    from slapo_core import Schedule

    if not isinstance(schedule, Schedule):
        raise ArgumentError(
            f"fit takes a schedule (got {type(schedule).__name__})",
            hint="slapo.fit(slapo.create_schedule(model), '70GiB', batch)",
        )
    target = parse_bytes(memory)
    for name in ("rank", "observer"):
        if name in config:
            raise ArgumentError(
                f"fit has no argument {name!r}: it keeps each kind of rank within memory", hint=f"leave out {name}="
            )
    if offload:
        raise ArgumentError(
            "offload=True is not supported: no installed primitive moves activations to the host",
            hint='offload=False; to offload the optimizer\'s state: target="deepspeed" with zero_optimization',
        )
    if schedule.is_sealed:
        raise SealedError(
            "cannot fit a schedule that is built or sealed",
            hint="fit before build(), or create a new schedule of a fresh model",
        )
    own = mesh if mesh is not None else schedule.mesh
    sizes = own.sizes if isinstance(own, Mesh) else own
    batch = schedule.example_inputs if example_inputs is None else example_inputs
    if batch is None:
        raise ArgumentError(
            "fit needs one batch: example_inputs was not given, and the schedule has none",
            hint="sch.fit('70GiB', {'input_ids': ids, 'labels': ids}, optimizer=...)",
        )
    blocks = blocks_of(schedule, layers)
    asked = {"mesh": sizes, "optimizer": optimizer, "loss": loss, "device": device, "timeout": timeout, **config}
    estimates = _Estimates(schedule, batch, blocks, asked)
    before = estimates.of(())
    groups = _groups(before)

    def paths_of(counts: Sequence[int]) -> tuple[str, ...]:
        chosen = {block for (_, own), count in zip(groups, counts, strict=True) for block in own[:count]}
        return tuple(path for number, path in enumerate(blocks) if number in chosen)

    def peaks_of(counts: Sequence[int]) -> list[int]:
        kinds = estimates.of(paths_of(counts)).kinds
        return [max(kinds[kind].memory.total for kind in own) for own, _ in groups]

    counts = fewest([len(own) for _, own in groups], peaks_of, target)
    if counts is None:
        least = min(estimates.tried.values(), key=lambda one: one.memory.total)
        raise _nothing_fits(target, before, least, blocks)
    paths = paths_of(counts)
    _checkpoint(schedule, paths, f"fit(memory={format_bytes(target)!r})")
    curve = sorted(
        (
            Point(tried, found.memory.total, flops_of(found) - flops_of(before), found.time)
            for tried, found in estimates.tried.items()
        ),
        key=lambda point: (point.peak, -len(point.paths)),
    )
    return Fit(paths, target, estimates.of(paths), before, tuple(curve), estimates.made)


def fewest(
    sizes: Sequence[int], peaks_of: Callable[[Sequence[int]], Sequence[int]], target: int
) -> tuple[int, ...] | None:
    """Find the smallest numbers of checkpointed blocks that fit into ``target``.

    A group's peak falls with its number of blocks. The last blocks may raise it again, recomputed while nothing is free
    yet; if all of them do not fit, fewer are tried as long as the peak falls.

    Args:
        sizes: number of blocks of each group.
        peaks_of: numbers of blocks -> bytes of each group, which depend on the group's own number only.
        target: bytes.

    Returns:
        a number for each group; None if nothing fits.
    """
    groups = range(len(sizes))
    walking = [group for group, peak in enumerate(peaks_of([0] * len(sizes))) if peak > target]
    low = [0 if group in walking else -1 for group in groups]
    high = [size if group in walking else 0 for group, size in enumerate(sizes)]
    last = [math.inf] * len(sizes)
    while walking:
        if any(high[group] == 0 for group in walking):
            return None
        now = peaks_of(high)
        walking = [group for group in walking if now[group] > target]
        if any(now[group] >= last[group] for group in walking):
            return None
        for group in walking:
            last[group] = now[group]
            high[group] -= 1
    while any(high[group] - low[group] > 1 for group in groups):
        middle = [(low[group] + high[group]) // 2 if high[group] - low[group] > 1 else high[group] for group in groups]
        now = peaks_of(middle)
        for group in groups:
            if middle[group] != high[group] and now[group] <= target:
                high[group] = middle[group]
            elif middle[group] != high[group]:
                low[group] = middle[group]
    return tuple(high)


def flops_of(estimate: Estimate) -> int:
    """Return the FLOPs of a step, of one rank of each kind."""
    return sum(kind.flops for kind in estimate.kinds)


def _groups(estimate: Estimate) -> list[tuple[list[int], list[int]]]:
    """Group kinds of ranks that call the same blocks: a group for each pipeline stage."""
    found: list[tuple[set[int], set[int]]] = []
    for kind, each in enumerate(estimate.kinds):
        kinds, blocks = {kind}, set(each.observed)
        for other in [one for one in found if one[1] & blocks]:
            found.remove(other)
            kinds, blocks = kinds | other[0], blocks | other[1]
        found.append((kinds, blocks))
    return [(sorted(kinds), sorted(blocks)) for kinds, blocks in found]


def _checkpoint(schedule: Schedule, paths: Sequence[str], why: str) -> None:
    """Apply all steps, or none."""
    before = len(schedule.records)
    location = f"{caller_location('slapo_estimate')}, {why}"
    try:
        for path in paths:
            Internals(schedule).apply(Internals(schedule).node(path), Checkpoint(), location=location)
    except BaseException:
        schedule.undo(to=before)
        raise


@dataclass(frozen=True)
class Checkpointed:
    """A source with further checkpointed modules.

    Args:
        source: makes the schedule.
        paths: paths of the modules.
    """

    source: ScheduleSource
    paths: tuple[str, ...]

    def schedule(self, mesh: Mapping[str, int] | None, example_inputs: Any) -> Schedule:
        """Make the schedule, and checkpoint the modules."""
        schedule = self.source.schedule(mesh, example_inputs)
        for path in self.paths:
            Internals(schedule).apply(Internals(schedule).node(path), Checkpoint(), location="fit")
        return schedule


@dataclass(frozen=True)
class CalledBlocks:
    """Make an observer of the blocks that a rank calls, by their numbers.

    Args:
        paths: paths of the blocks.
    """

    paths: tuple[str, ...]

    def __call__(self, schedule: Schedule, trackers: Trackers) -> _Called:
        return _Called([Internals(schedule).node(path).module for path in self.paths])


class _Called:
    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._called: set[int] = set()
        for number, module in enumerate(modules):
            module.register_forward_pre_hook(lambda *_, number=number: self._called.add(number))

    def begin(self) -> None: ...

    def on_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None: ...

    def result(self) -> tuple[int, ...]:
        return tuple(sorted(self._called))


_KNOWN: WeakKeyDictionary[Schedule, dict[bytes, Estimate]] = WeakKeyDictionary()
"""A cache: estimates of a schedule by its steps and arguments, freed with the schedule."""


class _Estimates:
    """Estimates of a schedule with checkpointed blocks, cached by its steps and arguments."""

    def __init__(self, schedule: Schedule, batch: Any, blocks: tuple[str, ...], arguments: Mapping[str, Any]) -> None:
        self._source = of_schedule(schedule)
        self._batch, self._blocks, self._arguments = sendable_batch(batch), blocks, dict(arguments)
        self._known = _KNOWN.setdefault(schedule, {})
        about = {name: value for name, value in self._arguments.items() if name != "timeout"}
        for name, value in about.items():
            require_sendable(name, value, f"{name}=functools.partial(...)")
        self._key = pickle.dumps((self._source, self._batch, blocks, about))
        self.tried: dict[tuple[str, ...], Estimate] = {}
        self.made = 0  # kinds of ranks

    def of(self, paths: tuple[str, ...]) -> Estimate:
        key = hashlib.sha256(self._key + pickle.dumps(paths)).digest()
        if key not in self._known:
            observer = CalledBlocks(self._blocks) if not paths else None
            source = Checkpointed(self._source, paths)
            self._known[key] = estimate_source(source, self._batch, observer=observer, **self._arguments)
            self.made += len(self._known[key].kinds)
        self.tried[paths] = self._known[key]
        return self._known[key]


def _nothing_fits(target: int, before: Estimate, least: Estimate, blocks: tuple[str, ...]) -> FitError:
    """Make the error: target, least peak, and the tensors at that peak.

    Args:
        target: bytes.
        before: estimate of the schedule as it is.
        least: estimate with the least peak.
        blocks: paths of modules that could be checkpointed.
    """
    memory = least.memory
    of = f" of '{memory.module}'" if memory.module not in ("", "optimizer") else ""
    sizes = sorted(((size, kind) for kind, size in memory.by_kind().items() if size), reverse=True)
    tensors = ", ".join(f"{format_bytes(size)} of {kind}" for size, kind in sizes)
    return FitError(
        f"no choice of checkpoints fits {format_bytes(target)}:\n"
        f"  least peak: {format_bytes(memory.total)}, in the {memory.phase}{of}\n"
        f"  schedule as it is: {format_bytes(before.memory.total)}; {len(blocks)} modules could be checkpointed\n"
        f"  tensors at the least peak: {tensors}",
        least=memory.total,
        target=target,
        hint=_advice(memory, target),
    )


def _advice(memory: Memory, target: int) -> str:
    static = memory.parameters + memory.buffers + memory.gradients + memory.optimizer
    if static >= target:
        return (
            f"parameters, gradients and optimizer take {format_bytes(static)} with any batch: shard them over more "
            "ranks of tp or pp, use a smaller dtype or an optimizer with less state"
        )
    return (
        f"{format_bytes(memory.total - static)} depend on the batch: use a smaller batch, more micro-batches "
        "(accumulate=), more ranks of tp, or smaller modules in layers="
    )
