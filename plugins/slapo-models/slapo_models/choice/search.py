"""`auto_schedule`: the mesh and the schedule with the least predicted time that fits into memory.

Every division of the devices is predicted: replicas or shards, tensor parallelism, stages, micro-batches, and the
fewest checkpointed blocks that fit. A simulation of two blocks of each kind for each size of ``tp`` and two sizes of
the micro-batch predicts them all, so that the cost does not grow with the number of blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import slapo_core as slapo
from slapo_core.cli import table_lines
from slapo_core.errors import ArgumentError, EstimateError, FitError, PreconditionError, SlapoError
from slapo_core.internals import Internals
from slapo_estimate.block_profile import StepProfile
from slapo_estimate.composition import Layout, Prediction, memory_limit, predict, text_of_bytes
from slapo_estimate.depth import first_samples, profile_step, run_stages, samples_of
from slapo_estimate.device import DEVICES, DeviceSpec
from slapo_estimate.reduced_model import KEPT, BlockKinds
from slapo_models.auto import auto
from slapo_models.auto.finish import ADAMW
from slapo_models.auto.kernels import paying_kernels

MOST_TP = 8
"""Ranks along ``tp`` at most: the GPUs of a node."""

_LARGEST = 16
"""Samples of the largest profiled micro-batch; larger ones are extrapolated."""

_SETTLED = 0.1
"""Relative gain of seconds per sample in the largest micro-batch from which one in between is profiled, too."""

_TIE = 0.05
"""Relative difference below which predicted times count as equal: about their accuracy."""

_SHOWN = 5
"""Candidates and reasons in a table."""

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Apply = Callable[[slapo.Schedule], Any]


@dataclass(frozen=True)
class Candidate:
    """A division of the devices, with the best number of micro-batches and the checkpoints that it needs.

    Args:
        layout: sizes of the mesh, replicas or shards, micro-batches.
        samples: samples of a micro-batch.
        prediction: of a training step.
        steps: number of steps of the schedule, equal steps in repeated blocks counted once; and options of ``build``.
    """

    layout: Layout
    samples: int
    prediction: Prediction
    steps: int

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the mesh, outermost first; ``tp`` is always there."""
        return {**self.layout.mesh, "tp": self.layout.tp}

    @property
    def options(self) -> dict[str, object]:
        """The options of :func:`slapo_core.build`."""
        return self.layout.options

    def row(self) -> tuple[str, ...]:
        """Return the texts of a row of the table."""
        layout, predicted = self.layout, self.prediction
        sizes = " ".join(f"{name}={size}" for name, size in layout.mesh.items()) or "one device"
        return (
            sizes,
            "shards" if layout.shards else "replicas" if layout.dp > 1 else "-",
            f"{layout.microbatches} x {self.samples}",
            str(len(predicted.checkpointed)),
            f"{1e3 * predicted.time:.4g} ms",
            text_of_bytes(predicted.memory),
            text_of_bytes(predicted.traffic),
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values. Bytes and seconds."""
        predicted = self.prediction
        return {
            "mesh": self.layout.mesh,
            "options": self.options,
            "samples": self.samples,
            "time": predicted.time,
            "memory": predicted.memory,
            "traffic": predicted.traffic,
            "checkpointed": len(predicted.checkpointed),
            "cuts": list(predicted.cuts),
        }


HEAD = ("MESH", "DATA PARALLEL", "MICRO-BATCHES x SAMPLES", "CHECKPOINTED", "TIME", "MEMORY", "SENT")
"""The head of a table of candidates: number of checkpointed blocks; per device, peak bytes and bytes sent in a step."""


@dataclass(frozen=True)
class Choice:
    """The result of :func:`auto_schedule`.

    Args:
        schedule: the best candidate's schedule.
        candidates: the best candidate of each mesh that fits, the best first.
        refused: meshes that do not fit or cannot run, and the reasons.
        memory: the limit, bytes; None without one.
        device: by which time is predicted.
        blocks: paths of the repeated blocks.
    """

    schedule: slapo.Schedule
    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]
    memory: int | None
    device: DeviceSpec
    blocks: tuple[str, ...] = field(repr=False)

    @property
    def best(self) -> Candidate:
        """The chosen candidate."""
        return self.candidates[0]

    @property
    def options(self) -> dict[str, object]:
        """The options of :func:`slapo_core.build` for the chosen candidate."""
        return self.best.options

    def __str__(self) -> str:
        return "\n".join([*table_lines(HEAD, self.rows()), *self.summary()])

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows: of the best candidates, the best first."""
        return [candidate.row() for candidate in self.candidates[:_SHOWN]]

    def summary(self) -> list[str]:
        """Return the lines below the table: how many meshes fit, and why others do not."""
        limit = "" if self.memory is None else f" in {text_of_bytes(self.memory)}"
        more = f"; {len(self.refused)} do not fit or run:" if self.refused else ""
        fit = "mesh fits" if len(self.candidates) == 1 else "meshes fit"
        lines = [f"{len(self.candidates)} {fit}{limit}, on {self.device.name}{more}"]
        lines += [f"  {name}: {' '.join(reason.split())}" for name, reason in self.refused[:_SHOWN]]
        left = len(self.refused) - _SHOWN
        return [*lines, *([f"  and {left} more"] if left > 0 else [])]


def auto_schedule(
    model: nn.Module,
    example_inputs: Any,
    *,
    devices: int,
    memory: int | str | None = None,
    device: DeviceSpec | str = "a100",
    optimizer: Optimizer | None = ADAMW,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    schedule: Apply | None = None,
    kernels: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> Choice:
    """Choose the mesh for a model, and schedule it, by predicted time under a limit of memory.

    Meshes of ``dp``, ``pp`` and ``tp`` are compared, with replicas or shards (``data_parallel="fsdp"``),
    micro-batches, stages cut at repeated blocks by time, and the fewest checkpointed blocks that fit. Of predictions
    within 5 % the one with fewer steps wins. ``slapo tune`` measures the best ones.

    Args:
        model: the model, also on the meta device; it is scheduled.
        example_inputs: the batch of one training step of all replicas, samples along the first axis; its tensors may
            be on the meta device. Each mesh divides it, so that all take the same step.
        devices: number of ranks.
        memory: bytes of a device, or e.g. ``"70GiB"``. Default: 90 % of the device's memory, if that is known.
        device: by which time is predicted: a specification, or the name of a known one: ``"a100"``, ``"h100"``.
        optimizer: as for :func:`slapo_core.build`, at the top level of a module or a ``functools.partial``; None for
            no optimizer.
        loss: as for :func:`slapo_core.build`.
        schedule: applies steps for the ranks along ``tp`` (and kernels) to a schedule; default:
            :func:`slapo_models.auto`. It is called for models of few blocks, too.
        kernels: whether :func:`slapo_models.auto` replaces patterns where that pays.
        tell: is called with each part of the work, for progress.

    Returns:
        the schedule on the chosen mesh, the options of ``build``, and the other candidates.

    Raises:
        ArgumentError: an argument is invalid, or the model has no repeated blocks.
        FitError: no mesh fits.
        SlapoError: see :func:`slapo_core.estimate`.
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ArgumentError(f"devices must be a positive number of ranks (got {devices!r})", hint="devices=8")
    spec = _device(device)
    limit = memory_limit(memory, spec)
    blocks = BlockKinds.of(model)
    if schedule is None:
        tell("kernels")
        sample = first_samples(example_inputs, 1)
        found = paying_kernels(model, blocks, sample, spec, loss) if kernels and blocks.paths else None
        schedule = functools.partial(auto, kernels=tuple(found.chosen) if found is not None else False)
    search = Search(model, blocks, example_inputs, devices, limit, spec, optimizer, loss, schedule, tell)
    candidates = search.candidates()
    if not candidates:
        raise FitError(
            f"no division of {devices} devices fits {text_of_bytes(limit or 0)}:\n"
            + "\n".join(f"  {mesh}: {reason}" for mesh, reason in search.refused[:8]),
            least=search.least or 0,
            target=limit or 0,
            hint="more devices, a smaller batch, a smaller dtype, or an optimizer with less state",
        )
    best = candidates[0]
    replica = first_samples(example_inputs, best.samples)
    made = slapo.create_schedule(model, mesh=best.mesh, example_inputs=replica)
    search.apply(made)
    apply_choice(made, search.blocks.paths, best)
    return Choice(made, tuple(candidates), tuple(search.refused), limit, spec, search.blocks.paths)


def apply_choice(sch: slapo.Schedule, blocks: tuple[str, ...], candidate: Candidate) -> None:
    """Checkpoint the candidate's blocks, and cut the model into its stages.

    Args:
        sch: a schedule with the other steps.
        blocks: paths of the repeated blocks.
        candidate: the chosen one.
    """
    for number in candidate.prediction.checkpointed:
        node: Any = sch[blocks[number]]
        node.checkpoint()
    for number in candidate.prediction.cuts:
        node = sch[blocks[number]]
        node.pipeline_split()


def _device(device: DeviceSpec | str) -> DeviceSpec:
    if isinstance(device, DeviceSpec):
        return device
    if not isinstance(device, str) or device not in DEVICES:
        raise ArgumentError(
            f"device must be a DeviceSpec, or one of {', '.join(sorted(DEVICES))} (got {device!r})",
            hint='device="h100", or DeviceSpec.from_json("device.json") of `slapo device measure --json device.json`',
        )
    return DEVICES[device]


@dataclass
class Search:
    """The candidates of one model.

    Args:
        model: only read.
        blocks: its repeated blocks.
        batch: of a step of all replicas.
        devices: number of ranks.
        limit: bytes of a device; None for no limit.
        device: by which time is predicted.
        optimizer: as for :func:`slapo_core.build`.
        loss: as for :func:`slapo_core.build`.
        apply: applies the steps for ``tp``.
        tell: is called with each part of the work.
        refused: meshes that do not fit or run, and the reasons.
        least: the least bytes of a mesh that does not fit.
        kept: simulated blocks of each kind; None for all.
        known: profiles by ``tp`` and samples.
    """

    model: nn.Module
    blocks: BlockKinds
    batch: Any
    devices: int
    limit: int | None
    device: DeviceSpec
    optimizer: Optimizer | None
    loss: Callable[[Any, Any], torch.Tensor] | None
    apply: Apply
    tell: Callable[[str], None]
    refused: list[tuple[str, str]] = field(default_factory=list)
    least: int | None = None
    kept: int | None = KEPT
    known: dict[tuple[int, int], StepProfile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.blocks.paths:
            raise ArgumentError(
                f"{type(self.model).__name__} has no repeated blocks, by which costs of meshes are predicted",
                hint="blocks of one class in a ModuleList or Sequential; or create_schedule(model, mesh=...) and "
                "sch.estimate(...) for each mesh",
            )
        self.samples = samples_of(self.batch)
        self.sizes = divisors(self.samples)
        self._steps = 0
        self._records: dict[tuple[int, int | None], tuple[slapo.Record, ...]] = {}

    def candidates(self) -> list[Candidate]:
        """Return the best candidate of each mesh that fits, the best first."""
        best: dict[Layout, Candidate] = {}
        for each in self.every():
            key = replace(each.layout, microbatches=1)
            best[key] = min(best.get(key, each), each, key=lambda one: (one.prediction.time, one.steps))
        best_first = ordered(list(best.values()))
        return self._that_run(best_first) if best_first and best_first[0].layout.pp > 1 else best_first

    def every(self) -> Iterator[Candidate]:
        """Yield each mesh with each number of micro-batches that fits; record the meshes of which none does."""
        unsplit: int | None = None
        for tp in (size for size in divisors(self.devices) if size <= MOST_TP):
            profiles = self._profiles(tp)
            if profiles is None:
                continue
            regions = (profiles[0].before, profiles[0].after, *profiles[0].plain.values())
            parameters = sum(each.parameters for each in regions)
            if unsplit is not None and parameters >= unsplit:
                self.refused.append((f"tp={tp}", "no parameter is split over tp"))
                continue
            unsplit = parameters if tp == 1 else unsplit
            yield from self._with(tp, profiles)

    def _with(self, tp: int, profiles: list[StepProfile]) -> Iterator[Candidate]:
        """Yield the candidates with ``tp``."""
        for pp in divisors(self.devices // tp):
            if pp > len(self.blocks.paths):
                break
            dp = self.devices // tp // pp
            name = " ".join(f"{key}={size}" for key, size in Layout(tp, pp, dp, False, 1).mesh.items()) or "one device"
            if self.samples % dp:
                self.refused.append((name, f"the {self.samples} samples of a step are not divisible by dp={dp}"))
                continue
            for shards in (False, True)[: 1 + (dp > 1)]:
                sizes = [size for size in divisors(self.samples // dp) if pp == 1 or self.samples // dp // size >= pp]
                if not sizes:
                    samples = f"{self.samples // dp} sample{'' if self.samples == dp else 's'}"
                    self.refused.append((name, f"a replica has {samples} for {pp} stages"))
                    break
                tried = [self._candidate(tp, pp, dp, shards, size, profiles) for size in sizes]
                fitting = [candidate for candidate in tried if candidate is not None]
                yield from fitting
                if not fitting:
                    self._refuse(name, tp, pp, dp, shards, profiles)

    def _candidate(
        self, tp: int, pp: int, dp: int, shards: bool, size: int, profiles: list[StepProfile], *, bounded: bool = True
    ) -> Candidate | None:
        layout = Layout(tp, pp, dp, shards, self.samples // dp // size)
        limit = self.limit if bounded else None
        predicted = predict(_at(profiles, size), self.blocks.kinds, layout, self.device, limit)
        if predicted is None:
            return None
        steps = self._steps * (tp > 1) + len(layout.options) + len(predicted.cuts) + bool(predicted.checkpointed)
        return Candidate(layout, size, predicted, steps)

    def _refuse(self, name: str, tp: int, pp: int, dp: int, shards: bool, profiles: list[StepProfile]) -> None:
        """Record how much memory a mesh needs at least without checkpoints."""
        smallest = self._candidate(tp, pp, dp, shards, 1, profiles, bounded=False)
        assert smallest is not None
        needed = smallest.prediction.memory
        self.least = needed if self.least is None else min(self.least, needed)
        what = "shards" if shards else "replicas"
        self.refused.append((name + f" ({what})" * (dp > 1), f"{text_of_bytes(needed)} without checkpoints"))

    def _profiles(self, tp: int) -> list[StepProfile] | None:
        """Return profiles of micro-batches, the smallest first; None if the steps are refused."""
        largest, kept = largest_profiled(self.sizes), self.kept
        try:
            profiles = [self._profile(tp, size) for size in dict.fromkeys((1, largest))]
            between = [size for size in self.sizes if 1 < size < largest]
            if between and _gain(*profiles) > _SETTLED:  # the seconds of a sample change
                middle = min(between, key=lambda size: abs(size * size - largest))
                profiles.insert(1, self._profile(tp, middle))
        except PreconditionError as error:
            self.refused.append((f"tp={tp}", error.message))
            return None
        except EstimateError as error:
            if tp == 1:  # the model itself does not run
                raise
            self.refused.append((f"tp={tp}", f"the schedule does not run: {error.message.splitlines()[0]}"))
            self.kept = kept
            return None
        return profiles

    def _profile(self, tp: int, size: int) -> StepProfile:
        if (tp, size) in self.known:
            return self.known[tp, size]
        self.tell(f"tp={tp}, micro-batches of {size}")

        def counted(sch: slapo.Schedule) -> None:
            key = (tp, self.kept)
            if key not in self._records:
                self.apply(sch)
                self._records[key] = sch.records
            for record in self._records[key][len(sch.records) :]:  # the same model, another micro-batch
                Internals(sch).repeat(record)
            self._steps = len({(record.primitive.name, record.path.rpartition(".")[2]) for record in sch.records})

        def profiled() -> StepProfile:
            return profile_step(
                self.model,
                self.blocks,
                counted,
                first_samples(self.batch, size),
                mesh={"tp": tp},
                device=self.device,
                optimizer=self.optimizer,
                loss=self.loss,
                kept=self.kept,
            )

        try:
            self.known[tp, size] = profiled()
        except EstimateError:
            if self.kept is None:
                raise
            self.kept = None  # it may count its blocks by itself
            self.tell(f"tp={tp}, micro-batches of {size}, with all blocks")
            self.known[tp, size] = profiled()
        return self.known[tp, size]

    def _that_run(self, candidates: list[Candidate]) -> list[Candidate]:
        """Drop candidates with stages if the model cannot be cut between its blocks."""
        best = candidates[0]
        self.tell("stages")
        try:
            run_stages(
                self.model,
                self.blocks,
                self.apply,
                first_samples(self.batch, 2 * best.samples),
                tp=best.layout.tp,
                optimizer=self.optimizer,
                loss=self.loss,
            )
        except SlapoError as error:
            dropped = [candidate for candidate in candidates if candidate.layout.pp > 1]
            self.refused += [(candidate.row()[0], error.message.splitlines()[0]) for candidate in dropped]
            return [candidate for candidate in candidates if candidate.layout.pp == 1]
        return candidates


def ordered(candidates: list[Candidate]) -> list[Candidate]:
    """Sort by time; of those within 5 % of the best the one with the fewest steps comes first."""
    by_time = sorted(candidates, key=lambda each: (each.prediction.time, each.steps, tuple(each.mesh.items())))
    if not by_time:
        return []
    near = [each for each in by_time if each.prediction.time <= by_time[0].prediction.time * (1 + _TIE)]
    best = min(near, key=lambda each: (each.steps, each.prediction.time))
    return [best, *(each for each in by_time if each is not best)]


def largest_profiled(sizes: list[int]) -> int:
    """Return the size of the largest profiled micro-batch, of ascending sizes from 1 on: a line needs two."""
    return max([size for size in sizes if size <= _LARGEST][1:] or sizes[:2])


def _gain(small: StepProfile, large: StepProfile) -> float:
    """Return the relative gain of seconds per sample in the larger micro-batch."""
    return float(1 - (large.seconds / large.samples) / (small.seconds / small.samples))


def _at(profiles: list[StepProfile], size: int) -> StepProfile:
    """Return the profile of a size: measured, or on the line through the two nearest ones."""
    exact = next((profile for profile in profiles if profile.samples == size), None)
    if exact is not None or len(profiles) == 1:
        return exact or profiles[0]
    above = next((number for number, profile in enumerate(profiles) if profile.samples > size), len(profiles) - 1)
    high = max(above, 1)
    return profiles[high].at(size, profiles[high - 1])


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]
