"""`fit`: choose what to checkpoint (recompute), so that a training step stays within a number of bytes.

Activation checkpointing trades memory for computing a module's forward a second time (Chen et al., "Training Deep Nets
with Sublinear Memory Cost", 2016). The first blocks of a model keep their activations longest, so they are checkpointed
first, and the peak falls with their number: the smallest number that fits is found by bisection, and every number that
is tried is estimated. Pipeline stages share no blocks, so that each has a number of its own, all found together.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from slapo_core import Node
from slapo_core.errors import ArgumentError, FitError, PreconditionError, SealedError
from slapo_core.internals import (
    Checkpoint,
    Internals,
    buffers_of,
    caller_location,
    checkpoints,
    children_of,
    module_index,
    parameters_of,
)
from slapo_core.layout import Mesh
from slapo_estimate.estimates import estimate_source
from slapo_estimate.source import Source, of_schedule, require_sendable, sendable_batch
from slapo_runtime.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from torch import nn

    from slapo_core import Schedule
    from slapo_estimate.device import DeviceSpec
    from slapo_estimate.rank_process import Trackers
    from slapo_estimate.results import Estimate, Memory

_NAMED = 'layers=["encoder", "decoder"], paths or globs of modules that may be checkpointed'


def blocks_of(schedule: Schedule, layers: str | Sequence[str] | None) -> tuple[str, ...]:
    """Give the paths of what may be checkpointed and is not yet: those named in their order, else in the model's.

    Args:
        schedule: as it is now.
        layers: paths or globs; None: the repeated blocks.

    Raises:
        PathError: a path or glob matches nothing.
        ArgumentError: one block lies within another; or there is nothing that repeats.
        PreconditionError: a block that the user names cannot be checkpointed.
    """
    if layers is None:
        paths = repeated_blocks(schedule.model)
        if not paths:
            raise ArgumentError(
                f"no blocks of {type(schedule.model).__name__} repeat, so that fit does not know what to checkpoint",
                hint=_NAMED,
            )
    else:
        patterns = (layers,) if isinstance(layers, str) else tuple(layers)
        found: dict[str, None] = {}
        for pattern in patterns:
            selected = schedule[pattern]
            found.update((node.path, None) for node in ((selected,) if isinstance(selected, Node) else selected))
        paths = list(found)
        if not paths:
            raise ArgumentError("layers names nothing that could be checkpointed (got an empty list)", hint=_NAMED)
    nodes = [Internals(schedule).node(path) for path in paths]
    _refuse_nested(paths)
    free = [node for node in nodes if not _is_checkpointed(node)]
    return tuple(node.path for node in free if _may_be_checkpointed(schedule, node, named=layers is not None))


def _may_be_checkpointed(schedule: Schedule, node: Node, *, named: bool) -> bool:
    """Return whether the step applies: tried, and undone. A path that you name must not be refused."""
    before = len(schedule.records)
    try:
        Internals(schedule).apply(node, Checkpoint())
    except PreconditionError:
        if named:
            raise
        return False
    finally:
        if len(schedule.records) > before:  # also where it is interrupted
            schedule.undo(to=before)
    return True


def _is_checkpointed(node: Node) -> bool:
    """Return whether the module, or one around it, is checkpointed already."""
    names = node.path.split(".") if node.path else []
    above = [".".join(names[:length]) for length in range(len(names) + 1)]
    return any(checkpoints(node._tree.node(path)) for path in above)


def _refuse_nested(paths: Sequence[str]) -> None:
    known = set(paths)
    for path in paths:
        names = path.split(".")
        for length in range(len(names)):
            outer = ".".join(names[:length])
            if outer in known and outer != path:
                raise ArgumentError(
                    f"'{path}' lies within '{outer}', and layers names both: only one of them can be checkpointed",
                    hint="name one level of modules",
                )


def repeated_blocks(model: nn.Module) -> list[str]:
    """Paths of the blocks that a model repeats.

    Blocks are siblings with numbers for names and one class: of a ``ModuleList`` or ``Sequential``. Where some of one
    class have equal shapes, or none of them holds further blocks, they are the blocks; else they are stages
    (ResNet, Swin), and the blocks are within.
    """
    siblings = list(_siblings(model))
    alike = {type(group[0][1]) for group in siblings if _have_equal_structure(group)}
    return [path for path, _ in _blocks(model, "", alike)]


def _blocks(module: nn.Module, path: str, alike: set[type]) -> Iterable[tuple[str, nn.Module]]:
    groups = {id(child): group for group in _block_groups(module) for _, child in group}
    for name, child in children_of(module).items():
        if child is None:
            continue
        child_path = module_index.full_name(path, name)
        within = list(_blocks(child, child_path, alike))
        if id(child) in groups and (type(child) in alike or not within) and any(True for _ in child.children()):
            yield child_path, child
        else:
            yield from within


def _siblings(model: nn.Module) -> Iterable[list[tuple[str, nn.Module]]]:
    for module in model.modules():
        yield from _block_groups(module)


def _block_groups(module: nn.Module) -> Iterable[list[tuple[str, nn.Module]]]:
    """Children with numbers for names, by class; at least two of each."""
    by_class: dict[type, list[tuple[str, nn.Module]]] = {}
    for name, child in children_of(module).items():
        if child is not None and name.isdigit():
            by_class.setdefault(type(child), []).append((name, child))
    return (group for group in by_class.values() if len(group) > 1)


def _have_equal_structure(group: Sequence[tuple[str, nn.Module]]) -> bool:
    return len({_structure(child) for _, child in group}) < len(group)


def _structure(module: nn.Module) -> tuple[object, ...]:
    """Equal for modules of the same classes, whose tensors have the same shapes and types."""
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for table in (parameters_of(module), buffers_of(module))
        for name, tensor in table.items()
        if tensor is not None
    )
    children = tuple((name, _structure(child)) for name, child in children_of(module).items() if child is not None)
    return (type(module), tensors, children)


@dataclass(frozen=True)
class Point:
    """One set of checkpointed blocks, estimated.

    Args:
        paths: of the blocks that are checkpointed.
        peak: bytes of the rank that needs most.
        flops: floating-point operations of a step for recomputation, on all kinds of ranks.
        seconds: that a step takes, by the roofline; None without a device.
    """

    paths: tuple[str, ...]
    peak: int
    flops: int
    seconds: float | None


@dataclass(frozen=True)
class Fit:
    """The result of :func:`slapo_core.fit`: the chosen blocks and the curve of what was tried.

    Args:
        paths: of the modules that were checkpointed; empty where the schedule fitted as it was.
        target: bytes that were allowed.
        estimate: of the schedule as it is now.
        before: of the schedule as it was.
        curve: the points that were estimated, the least peak first; the last point has no block checkpointed.
        estimates: how many kinds of ranks were estimated for it; answers that were known already are not counted.
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
    """Checkpoint the first of the repeated blocks, as few as let a training step stay within ``memory`` on every rank.

    The steps are ordinary ``.checkpoint()`` steps, last in the schedule: ``sch.undo(to=...)`` takes them back. What is
    checkpointed already stays so. The number is found by bisection over estimates, for each pipeline stage on its own.
    Blocks that differ (T5's encoder and decoder) are not weighed against each other: name those to begin with in
    ``layers``.

    Args:
        schedule: the schedule.
        memory: bytes, or e.g. ``"70GiB"``: the peak of a training step, all that :class:`slapo_estimate.Memory`
            counts. The allocator's own loss (fragmentation) and the runtime's buffers come on top: leave them room.
        example_inputs: one batch; default: those of the schedule.
        optimizer: as for :func:`slapo_core.build`; None for none.
        mesh: sizes; default: the schedule's own.
        offload: refused: no primitive moves activations to the host.
        layers: what may be checkpointed, paths or globs: ``"encoder.layer.*"``; the first named first. Default: the
            repeated blocks, in the model's order.
        loss: as for :func:`slapo_core.build`.
        device: as for :func:`slapo_core.estimate`; None estimates no time.
        timeout: seconds for each kind of rank, at each estimate.
        config: ``accumulate``, and options of target ``"torch"``, as for :func:`slapo_core.estimate`.

    Raises:
        FitError: nothing fits; the message names the least peak and what holds it.
        ArgumentError: an invalid number, ``offload=True``, or nothing that can be checkpointed.
        PathError: a path or glob of ``layers`` matches nothing.
    """
    from slapo_core import Schedule

    if not isinstance(schedule, Schedule):
        raise ArgumentError(
            f"fit takes a schedule (got {type(schedule).__name__})",
            hint="slapo_core.fit(slapo_core.create_schedule(model), '70GiB', batch)",
        )
    target = parse_bytes(memory)
    for name in ("rank", "observer"):
        if name in config:
            raise ArgumentError(f"fit takes no {name}: it keeps every kind of rank within memory", hint="leave it out")
    if offload:
        raise ArgumentError(
            "offload=True: no installed primitive moves activations to the host",
            hint='leave it out; target="deepspeed" offloads the optimizer\'s state: its option zero_optimization',
        )
    if schedule.is_sealed:
        raise SealedError(
            "cannot fit: the schedule was built or sealed before",
            hint="fit before build(), or create a new schedule of a fresh model",
        )
    own = mesh if mesh is not None else schedule.mesh
    sizes = own.sizes if isinstance(own, Mesh) else own
    batch = schedule.example_inputs if example_inputs is None else example_inputs
    if batch is None:
        raise ArgumentError(
            "fit needs one batch to train on: none was given, and the schedule has no example_inputs",
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
    """The smallest numbers of checkpointed blocks with which every group of ranks stays within ``target``.

    A group's peak falls with its number of blocks. With the last ones it may rise again by what is recomputed while
    nothing is free yet; so where all of them do not fit, fewer are tried as long as the peak falls.

    Args:
        sizes: how many blocks each group has.
        peaks_of: bytes of each group, for a number of blocks for each; a group's depends on its own number only.
        target: bytes.

    Returns:
        None where nothing fits.
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
    """Of a step, one rank of each kind."""
    return sum(kind.flops for kind in estimate.kinds)


def _groups(estimate: Estimate) -> list[tuple[list[int], list[int]]]:
    """Kinds of ranks that call blocks in common, with those blocks: one group for each pipeline stage's ranks."""
    found: list[tuple[set[int], set[int]]] = []
    for kind, each in enumerate(estimate.kinds):
        kinds, blocks = {kind}, set(each.observed)
        for other in [one for one in found if one[1] & blocks]:
            found.remove(other)
            kinds, blocks = kinds | other[0], blocks | other[1]
        found.append((kinds, blocks))
    return [(sorted(kinds), sorted(blocks)) for kinds, blocks in found]


def _checkpoint(schedule: Schedule, paths: Sequence[str], why: str) -> None:
    """All of them, or none."""
    before = len(schedule.records)
    location = f"{caller_location('slapo_estimate')}, {why}"
    try:
        for path in paths:
            Internals(schedule).apply(Internals(schedule).node(path), Checkpoint(), location=location)
    except BaseException:
        schedule.undo(to=before)
        raise


# -- estimates ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpointed:
    """A source with further modules checkpointed.

    Args:
        source: of the schedule.
        paths: of the modules.
    """

    source: Source
    paths: tuple[str, ...]

    def schedule(self, mesh: Mapping[str, int] | None, example_inputs: Any) -> Schedule:
        """As :meth:`Source.schedule`, and the steps."""
        schedule = self.source.schedule(mesh, example_inputs)
        for path in self.paths:
            Internals(schedule).apply(Internals(schedule).node(path), Checkpoint(), location="fit")
        return schedule


@dataclass(frozen=True)
class CalledBlocks:
    """Makes an observer of the blocks that a rank calls, by their numbers.

    Args:
        paths: of the blocks.
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

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None: ...

    def result(self) -> tuple[int, ...]:
        return tuple(sorted(self._called))


_KNOWN: WeakKeyDictionary[Schedule, dict[bytes, Estimate]] = WeakKeyDictionary()
"""Estimates of a schedule by its steps and all that was asked: a cache, which goes with the schedule."""


class _Estimates:
    """Estimates of a schedule with blocks checkpointed, kept with the schedule by its steps and all that was asked."""

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


# -- where nothing fits ---------------------------------------------------------------------------------------------


def _nothing_fits(target: int, before: Estimate, least: Estimate, blocks: tuple[str, ...]) -> FitError:
    """The error; it says what holds the least peak that checkpointing reaches.

    Args:
        target: bytes.
        before: of the schedule as it is.
        least: of the set with the least peak.
        blocks: what could be checkpointed.
    """
    memory = least.memory
    what = "with as many of them checkpointed as help" if blocks else "and all that may be is checkpointed already"
    where = f"in the {memory.phase} of '{memory.module}'" if memory.module not in ("", "optimizer") else ""
    where = where or ("in the optimizer step" if memory.module == "optimizer" else f"in the {memory.phase}")
    return FitError(
        f"no choice of checkpoints fits {format_bytes(target)}: the least peak of a step is "
        f"{format_bytes(memory.total)} ({format_bytes(before.memory.total)} as the schedule is; {len(blocks)} modules "
        f"could be checkpointed, {what}). It is {where}, and holds {_shown(memory)}",
        least=memory.total,
        target=target,
        hint=_advice(memory, target),
    )


def _shown(memory: Memory) -> str:
    parts = {
        "parameters": memory.parameters,
        "buffers": memory.buffers,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "temporaries": memory.temporaries,
        "inputs": memory.inputs,
    }
    shown = sorted(((size, name) for name, size in parts.items() if size), reverse=True)
    return ", ".join(f"{format_bytes(size)} of {name}" for size, name in shown)


def _advice(memory: Memory, target: int) -> str:
    static = memory.parameters + memory.buffers + memory.gradients + memory.optimizer
    if static >= target:
        return (
            f"parameters, gradients and optimizer alone take {format_bytes(static)}, whatever the batch: shard them "
            "over more ranks of tp or pp, use a smaller dtype or an optimizer with less state"
        )
    return (
        f"{format_bytes(memory.total - static)} of it depend on the batch: a smaller one, or more micro-batches "
        "(accumulate=), more ranks of tp, or smaller modules in layers="
    )
