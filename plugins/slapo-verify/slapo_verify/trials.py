"""Run the reference model, the scheduled model, and parts of its schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import HookError, VerifyError
from slapo_core.internals import Internals
from slapo_core.primitive import Equivalence, Suggestion
from slapo_runtime.correspondence import Correspondence
from slapo_runtime.ranks.trial_groups import Failure
from slapo_runtime.ranks.world import Attempt, World
from slapo_verify.blame import Blame, find_steps
from slapo_verify.compare import OF_NORM, Comparison, Difference, Tolerance, compare, compare_dropout, room_for_rounding
from slapo_verify.copies import Counterparts, ModelCopies
from slapo_verify.divergence import advice, diverged, summarize, without_effect
from slapo_verify.fixes import OutputSplits, suggestions
from slapo_verify.inputs import Inputs
from slapo_verify.kinds import EARLY, ON_ONE_COPY, ORDER, OWN_TYPES
from slapo_verify.phases import Conditions, Observation, Runner, Withheld, step_size
from slapo_verify.precision import DtypeObserver, coarsest, own_dtype
from slapo_verify.receipts import Receipts
from slapo_verify.search import Failed, TrialOutcome
from slapo_verify.stages import Staging

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.primitive import Record


@dataclass(frozen=True)
class VerifyOptions:
    """Hold the keyword arguments of :func:`slapo_core.verify`."""

    rtol: float | None
    atol: float | None
    optimizer_steps: int
    seed: int
    more_batches: tuple[Inputs, ...] = ()
    blame_seconds: float | None = None
    timeout: float | None = None
    autocast: torch.dtype | None = None  # of the caller, for other processes
    effects: bool = True


@dataclass
class ReferenceRun:
    """Keep a run of the reference model: its values and types.

    Args:
        seen: its values in the phases being compared.
        conditions: that it ran under.
        phases: that it ran, in their order.
        coarsest: the coarsest type in which it computed anything.
        finer: kind and name of the tensors that other types led to, with the coarsest of these.
        dtype: the type in which it ran.
        room: kind and name of the tensors in its own types -> the absolute difference that its own rounding makes.
    """

    seen: Observation
    conditions: Conditions
    phases: tuple[str, ...]
    coarsest: torch.dtype
    finer: Mapping[tuple[str, str], torch.dtype]
    dtype: torch.dtype
    room: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """Describe a scheduled model to run, and how to copy it."""

    schedule: Schedule
    counterparts: Counterparts
    make: Callable[[torch.dtype | None], nn.Module]


@dataclass(frozen=True)
class TrialResult:
    """Describe the outcome of a scheduled model, or of some steps alone.

    Args:
        outcome: whether and how it fails.
        first: the rank and the difference that was found first, if it ran and differs.
        gradients: the parameters whose gradients differ, where nothing before them does.
        raised: where it raised; None if it did not.
    """

    outcome: TrialOutcome
    first: tuple[int, Difference] | None = None
    gradients: Sequence[str] = ()
    raised: Attempt[Any] | None = None

    @classmethod
    def raising(cls, raised: Attempt[Any] | None) -> TrialResult:
        assert raised is not None
        return cls(Failed.with_exception(raised.failures[0]), raised=raised)

    @property
    def agrees(self) -> bool:
        return self.outcome == "agrees"

    @property
    def kind(self) -> str | None:
        """Return the kind of the first difference; None without one."""
        return self.first[1].kind if self.first is not None else None

    @property
    def failures(self) -> Sequence[Failure]:
        """Return the exceptions, with their ranks."""
        return self.raised.failures if self.raised is not None else ()


class OtherRankError(VerifyError):
    """Report an error that another rank raised."""


def reraise(attempt: Attempt[Any]) -> None:
    """Raise the error of a rank before anything ran: this rank's, or the first."""
    if not attempt.failures:
        return
    if attempt.error is not None:
        raise attempt.error
    first = attempt.failures[0]
    raise OtherRankError(f"rank {first.rank} could not start: {first}", rank=first.rank)


@dataclass(frozen=True)
class ScheduleTrials:
    """Run both models, and parts of the schedule, on all ranks in one order.

    Args:
        world: the ranks.
        inputs: one batch.
        copies: makes copies of both models.
        options: of the call.
        staging: calls the scheduled models stage by stage where they are cut; None ignores the cuts.
    """

    world: World
    inputs: Inputs
    copies: ModelCopies
    options: VerifyOptions
    staging: Staging | None = None

    @property
    def candidate(self) -> Candidate:
        """Return the scheduled model itself."""
        return Candidate(self.copies.schedule, self.copies.counterparts, self.copies.candidate)

    # -- the reference model ----------------------------------------------------------------------------------

    def start_reference(
        self, dtype: torch.dtype | None, withheld: frozenset[str]
    ) -> tuple[ReferenceRun, Runner, float]:
        """Run the first phases of the reference model; find a learning rate.

        Args:
            dtype: as of :class:`~slapo_verify.phases.Conditions`.
            withheld: likewise.
        """
        options = self.options
        conditions = Conditions(dtype, options.seed, options.optimizer_steps, withheld=withheld)
        model = self.copies.reference(dtype)
        base = self.own_dtype(model) if dtype is None else dtype
        runner = Runner(model, self.inputs.cast(dtype), conditions)  # before observing: casting is not the model's
        with DtypeObserver() as observer:
            seen = runner.run(EARLY)
        runner.inputs = self.inputs
        _require_gradients(runner, seen)
        lowest, finer = _types(seen, observer, base)
        conditions = dataclasses.replace(conditions, choices=tuple(observer.choices))
        return ReferenceRun(seen, conditions, EARLY, lowest, finer, base), runner, step_size(model, seen)

    def add_reference(self, reference: ReferenceRun, phase: str, runner: Runner | None = None) -> None:
        """Run one more phase of the reference model, and add its values."""
        conditions = reference.conditions
        if phase not in ON_ONE_COPY:
            model = self.copies.reference(None if phase == OWN_TYPES else conditions.dtype)
            runner = Runner(model, self.inputs, conditions)
        assert runner is not None
        runner.conditions = conditions
        with DtypeObserver() if phase == OWN_TYPES else contextlib.nullcontext() as observer:
            seen = runner.run((phase,))
        if observer is not None:
            lowest, finer = _types(seen, observer, self.own_dtype(runner.model))
            types = {(kind, name): finer.get((kind, name), lowest) for kind in seen.values for name in seen.of(kind)}
            reference.room = room_for_rounding(reference.seen, seen, types)
            reference.finer = {**reference.finer, **types}
        reference.seen.values.update(seen.values)
        reference.phases = (*dict.fromkeys((*reference.phases, phase)),)

    def again(self, reference: ReferenceRun, phases: Sequence[str]) -> ReferenceRun:
        """Repeat the run, with the given phases that it had."""
        repeated, runner, _ = self.start_reference(reference.conditions.dtype, reference.conditions.withheld)
        again = dataclasses.replace(reference, seen=repeated.seen, phases=EARLY)
        for phase in phases:
            if phase in reference.phases and phase not in EARLY:
                self.add_reference(again, phase, runner)
        return again

    def own_dtype(self, model: nn.Module) -> torch.dtype:
        """Return the coarsest type of a model, or else of the inputs."""
        return own_dtype(model, (tensor for _, tensor in self.inputs.tensors()))

    # -- scheduled models -------------------------------------------------------------------------------------

    def run(self, candidate: Candidate, reference: ReferenceRun, phases: Sequence[str]) -> Attempt[Observation]:
        """Run ``phases`` of a scheduled model under the conditions of the reference model."""
        early = [phase for phase in phases if phase in EARLY]
        started = self.world.attempt(lambda: self.start(candidate, reference, early))
        if started.failures:
            return Attempt(None, started.error, started.failures)
        runner, seen = started.value()
        reason = self.other_stream(candidate, reference, seen) if "dropout" in phases else None

        def finish() -> Observation:
            for phase in phases:
                if phase not in EARLY:
                    seen.values.update(self.late(candidate, reference, phase, runner).values)
            return seen

        finished = self.world.attempt(finish)
        if not finished.failures and "dropout" in phases:
            self.share_dropout(candidate, seen, other_stream=reason is not None)
        return finished

    def start(
        self,
        candidate: Candidate,
        reference: ReferenceRun,
        phases: Sequence[str] = EARLY,
        receipts: Receipts | None = None,
    ) -> tuple[Runner, Observation]:
        """Run the first phases; return the runner and their values."""
        model = candidate.make(reference.conditions.dtype)
        runner = Runner(model, self.inputs, self.conditions(candidate, reference, apart=True))
        runner.watch = None if receipts is None else receipts.watching
        return runner, runner.run(phases)

    def late(
        self, candidate: Candidate, reference: ReferenceRun, phase: str, runner: Runner | None = None
    ) -> Observation:
        """Run a later phase on the same copy, or on a fresh one."""
        conditions = self.conditions(candidate, reference)
        if phase not in ON_ONE_COPY:
            model = candidate.make(None if phase == OWN_TYPES else conditions.dtype)
            runner = Runner(model, self.inputs, conditions)
        assert runner is not None
        runner.conditions = conditions
        return runner.run((phase,))

    def conditions(self, candidate: Candidate, reference: ReferenceRun, *, apart: bool = False) -> Conditions:
        """Adapt the conditions to a scheduled model; ``apart``: isolated stages."""
        adapted = dataclasses.replace(reference.conditions, adapt_output=_output_adapter(candidate.schedule))
        if self.staging is None:
            return adapted
        caller = functools.partial(self.staging.caller, candidate.schedule, apart=apart)
        return dataclasses.replace(adapted, caller=caller)

    def share_dropout(self, candidate: Candidate, seen: Observation, *, other_stream: bool) -> None:
        """Exchange the ranks' dropout; no rank may have failed.

        With another RNG stream than the reference model's (``other_stream``), outputs and gradients are not compared
        with its own; recomputation is, with this model's own forward.
        """
        drawn = seen.values.pop("drawn with dropout")["forward"]
        mesh = candidate.schedule.mesh
        if not self.world.is_alone and mesh is not None:
            both = seen.of("output with dropout"), seen.of("gradient with dropout")
            ranks = self.world.gather(summarize(mesh, *both, drawn, candidate.counterparts))
            seen.values["diverged dropout"] = {"ranks": ranks}
        for kind in ("output with dropout", "gradient with dropout") if other_stream else ():
            seen.values.pop(kind)

    def advice(self, reference: ReferenceRun, seen: Observation) -> list[str]:
        """Return notes on the ranks' dropout, where it is right."""
        ranks, drawn = seen.of("diverged dropout").get("ranks", []), reference.seen.of("dropout")["forward"]
        records = self.copies.schedule.records
        return [*filter(None, (advice(ranks, drawn), without_effect(ranks, drawn, records)))]

    def other_stream(self, candidate: Candidate, reference: ReferenceRun, seen: Observation) -> str | None:
        """Return why a rank's dropout rightly uses another RNG stream."""
        promise = Equivalence.weakest(record.primitive.equivalence for record in candidate.schedule.records)
        alike = compare_dropout("dropout", reference.seen, seen, candidate.counterparts, promise)
        return next(filter(None, self.world.gather(alike.other_stream or alike.wrong)), None)

    def withheld(self, seen: Observation) -> frozenset[str]:
        """Return the outputs that a scheduled model withholds in training, on any rank."""
        found = {name for name, value in seen.of("output").items() if isinstance(value, Withheld)}
        return frozenset[str]().union(*self.world.gather(found))

    def was_refused(self, attempt: Attempt[Any]) -> bool:
        """Return whether plugins refused to cut the model, or answered wrongly."""
        refusals = self.staging.refusals if self.staging is not None else set()
        refused = all((failure.kind, failure.text) in refusals for failure in attempt.failures)
        return all(self.world.gather(refused))

    def contradicts_itself(self, attempt: Attempt[Any]) -> bool:
        """Return whether plugins answered wrongly about stages."""
        return self.was_refused(attempt) and any(failure.kind == HookError.__name__ for failure in attempt.failures)

    # -- comparing --------------------------------------------------------------------------------------------

    def tolerance(self, reference: ReferenceRun, records: Sequence[Record]) -> Tolerance:
        """Return the tolerance of the promises of ``records``."""
        return self._tolerance(reference.coarsest, records)

    def _tolerance(
        self, dtype: torch.dtype, records: Sequence[Record], room: float | None = None, *, jumps: bool = False
    ) -> Tolerance:
        """Return the tolerance with ``room`` for rounding; options only widen it."""
        promises = [record.primitive.equivalence for record in records]
        rtol, atol = self.options.rtol, self.options.atol
        if room is None:
            return Tolerance.of(dtype, promises, rtol=rtol, atol=atol)
        rule = Tolerance.of(dtype, promises, rtol=None, atol=None)
        relative, absolute = max(rule.rtol, rtol or 0.0), max(rule.atol, atol or 0.0) + room
        of_norm = OF_NORM.get(dtype, 0.2) if jumps else 0.0
        return dataclasses.replace(rule, rtol=relative, atol=absolute, of_norm=of_norm)

    def compare(
        self, reference: ReferenceRun, seen: Observation, names: Counterparts, records: Sequence[Record]
    ) -> Comparison:
        """Compare this rank's run with the reference model's; raises where any rank raises."""

        def run() -> Comparison:
            finer = {
                place: self._tolerance(dtype, records, reference.room.get(place), jumps=place[0] == "own gradient")
                for place, dtype in reference.finer.items()
            }
            compared = compare(reference.seen, seen, names, self.tolerance(reference, records), finer)
            ranks = seen.of("diverged dropout").get("ranks", [])
            reference_model = reference.seen.of("dropout").get("forward", [])
            compared.add(Comparison(diverged(ranks, reference_model, records, reference.coarsest)))
            return compared

        compared = self.world.attempt(run)
        reraise(compared)
        return compared.value()

    def conclude(self, own: Comparison) -> TrialResult:
        """Merge the ranks' comparisons: the earliest kind decides."""
        by_rank = zip(self.world.ranks, self.world.gather(own.differences[:1]), strict=True)
        firsts = [(rank, found[0]) for rank, found in by_rank if found]
        first = min(firsts, key=lambda item: (ORDER.index(item[1].kind), item[0]), default=None)
        if first is None:
            return TrialResult("agrees")
        names = [found.name for found in own.differences if found.kind == first[1].kind]
        on_ranks = self.world.gather(names if first[1].kind == "gradient" else [])
        return TrialResult(Failed.by(first[1]), first, list(dict.fromkeys(name for rank in on_ranks for name in rank)))

    def judge(
        self, candidate: Candidate, reference: ReferenceRun, phases: Sequence[str], records: Sequence[Record]
    ) -> TrialResult:
        """Run ``phases`` of a scheduled model, and compare them."""
        ran = self.run(candidate, reference, phases)
        if ran.failures:
            return TrialResult.raising(ran)
        withheld = reference.conditions.withheld | self.withheld(ran.value())
        if withheld != reference.conditions.withheld:
            conditions = dataclasses.replace(reference.conditions, withheld=withheld)
            reference = self.again(dataclasses.replace(reference, conditions=conditions), phases)
            return self.judge(candidate, reference, phases, records)
        return self.conclude(self.compare(reference, ran.value(), candidate.counterparts, records))

    # -- blame ------------------------------------------------------------------------------------------------

    def blame(
        self,
        reference: ReferenceRun,
        phases: Sequence[str],
        result: TrialResult,
        *,
        near: str | None,
        records: Sequence[Record],
    ) -> Blame:
        """Find the steps that fail as ``records`` do, with ``result``."""
        started, limit = time.monotonic(), self.options.blame_seconds

        def is_over() -> bool:
            return limit is not None and any(self.world.gather(time.monotonic() - started > limit))

        @functools.cache
        def suggest() -> list[Suggestion]:
            return suggestions(self.copies.schedule, result.gradients, self.output_splits(reference))

        return find_steps(
            records,
            lambda part: self.try_steps(reference, phases, part).outcome,
            near=near,
            tied=self.copies.tied_modules(),
            failed=result.outcome if isinstance(result.outcome, Failed) else None,
            suggest=suggest,
            paths=[path for path, _ in self.copies.reference_model.named_modules()],
            stop=is_over,
        )

    def output_splits(self, reference: ReferenceRun) -> Mapping[str, tuple[int, ...]]:
        """Return the sizes into which the reference model splits its layers' outputs, by path."""
        model = self.copies.reference(reference.conditions.dtype)
        with OutputSplits(model) as found:
            Runner(model, self.inputs, reference.conditions).run(("evaluation",))
        return found.sizes

    def try_steps(
        self,
        reference: ReferenceRun,
        phases: Sequence[str],
        part: Sequence[Record],
        promises: Sequence[Record] | None = None,
    ) -> TrialResult:
        """Try ``part`` alone, under its own promises or others."""
        applied = self.world.attempt(lambda: self._applied(part))
        if applied.failures:
            return TrialResult("refused")
        schedule, counterparts = applied.value()
        schedules = iter([schedule])

        def make(dtype: torch.dtype | None) -> nn.Module:
            trial = next(schedules, None) or self.copies.trial(part)
            return self.copies.ready(trial, counterparts, dtype)

        return self.judge(
            Candidate(schedule, counterparts, make), reference, phases, part if promises is None else promises
        )

    def without_stages(self, reference: ReferenceRun, phases: Sequence[str], records: Sequence[Record]) -> TrialResult:
        """Try all or some steps of the schedule without the cuts."""
        plain = dataclasses.replace(self, staging=None)
        if len(records) < len(self.copies.schedule.records):
            return plain.try_steps(reference, phases, records)
        return plain.judge(self.candidate, reference, phases, records)

    def _applied(self, part: Sequence[Record]) -> tuple[Schedule, Counterparts]:
        schedule = self.copies.trial(part)
        correspondence, _ = Correspondence.of(schedule)
        correspondence.check()
        return schedule, Counterparts.of(correspondence, schedule.model)


def _output_adapter(schedule: Schedule) -> Callable[[Any], Any]:
    """Ask the plugins whether this rank's output has to be gathered first."""

    def adapt(output: Any) -> Any:
        answer = Internals(schedule).hooks.single("slapo_gather_output", node=schedule.root, output=output)
        return output if answer is None else answer[1]

    return adapt


def _require_gradients(runner: Runner, seen: Observation) -> None:
    """Require a gradient for some trained parameter.

    Raises:
        ValueError: nothing that is trained has a gradient, so that no backward pass could be compared.
    """
    trained = [name for name, parameter in runner.model.named_parameters() if parameter.requires_grad]
    if trained and all(gradient is None for gradient in seen.of("gradient").values()):
        raise ValueError(
            f"no output requires grad, but {len(trained)} parameters are trained, e.g. '{trained[0]}': freeze them "
            "(requires_grad_(False)), or return an output that is not detached"
        )


def _types(
    seen: Observation, observer: DtypeObserver, base: torch.dtype
) -> tuple[torch.dtype, dict[tuple[str, str], torch.dtype]]:
    """Return the coarsest type of a run, and finer types behind single tensors."""
    lowest = coarsest([base, *(found for found in observer.seen if _coarser(found, base))])
    finer = {
        (kind, name): found
        for kind in ORDER
        for name, value in seen.of(kind).items()
        if isinstance(value, torch.Tensor) and _coarser(lowest, found := observer.coarsest_to(value))
    }
    return lowest, finer


def _coarser(dtype: torch.dtype, base: torch.dtype) -> bool:
    return torch.finfo(dtype).eps > torch.finfo(base).eps
