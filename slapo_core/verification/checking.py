"""The course of a verification: both models run on every rank, every rank compares its own pieces, all agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import ArgumentError, VerifyError
from slapo_core.ranks.facts import RankFact, describe, describe_tensor
from slapo_core.ranks.world import Attempt, World
from slapo_core.schedule.agreement import SAME_SCRIPT, schedule_facts
from slapo_core.verification.blame import Blame, Outcome, find_steps
from slapo_core.verification.compare import Comparison, Difference, compare, label
from slapo_core.verification.counterparts import Counterparts, named_tensors
from slapo_core.verification.inputs import Inputs
from slapo_core.verification.precision import dtype_name
from slapo_core.verification.report import VerifyReport, merge_largest
from slapo_core.verification.run import Observation, run_stages
from slapo_core.verification.subjects import Subjects
from slapo_core.verification.tolerance import Tolerance
from slapo_core.verification.unexplained import refuse_unexplained
from slapo_core.verification.untouched import EARLY, UntouchedRun, UntouchedRuns
from slapo_core.weights.correspondence import Correspondence

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.record import Record

__all__ = ["Options", "check"]

_STAGE_OF_KIND = {
    "output": "training",
    "buffer": "training",
    "gradient": "training",
    "evaluation output": "evaluation",
    "input gradient": "inputs",
    "parameter": "updates",
}
_SAME_CALL = "make every rank build the same model (torch.manual_seed), and call verify with the same arguments"


@dataclass(frozen=True)
class Options:
    """The keyword arguments of :func:`slapo_core.verify`."""

    rtol: float | None
    atol: float | None
    optimizer_steps: int
    seed: int


def check(schedule: Schedule, example_inputs: Any, options: Options) -> VerifyReport:
    """Verify in this process, together with the other ranks of the mesh; see :func:`slapo_core.verify`."""
    with World(schedule.mesh) as world:
        prepared = world.attempt(lambda: _prepare(schedule, example_inputs, options))
        _reraise(prepared)
        inputs, subjects = prepared.value()
        world.agree(schedule_facts(schedule), hint=SAME_SCRIPT)
        world.agree(_facts(inputs, subjects.untouched, options), hint=_SAME_CALL)
        return _Check(world, inputs, subjects, options).run()


def _prepare(schedule: Schedule, example_inputs: Any, options: Options) -> tuple[Inputs, Subjects]:
    inputs = Inputs.of(schedule.example_inputs if example_inputs is None else example_inputs)
    return inputs, Subjects(schedule, device=inputs.device, seed=options.seed)


def _facts(inputs: Inputs, untouched: nn.Module, options: Options) -> Iterator[RankFact]:
    """What beside the schedule must be the same on every rank."""
    for name, value in dataclasses.asdict(options).items():
        yield RankFact(f"{name} given to verify", describe(value))
    yield from inputs.facts()
    for name, tensor in named_tensors(untouched):
        yield RankFact(f"'{name}' of the untouched model", describe_tensor(tensor))


def _reraise(attempt: Attempt[Any]) -> None:
    """Raise what a rank raised before anything ran: its own error, or the first one of the others."""
    if not attempt.failures:
        return
    if attempt.error is not None:
        raise attempt.error
    first = attempt.failures[0]
    raise VerifyError(f"rank {first.rank} could not start: {first}", rank=first.rank)


class _Check:
    def __init__(self, world: World, inputs: Inputs, subjects: Subjects, options: Options) -> None:
        self.world, self.inputs, self.subjects, self.options = world, inputs, subjects, options
        self.schedule = subjects.schedule
        self.notes: list[str] = []
        if subjects.frozen:
            self.notes.append(f"as the schedule says, in both models: {', '.join(subjects.frozen)}")

    def run(self) -> VerifyReport:
        refuse_unexplained(self.world, self.subjects)
        reference = self._reference(torch.float64)
        candidate = self._candidate(reference) if reference is not None else None
        if reference is None or (candidate is not None and candidate.failures):
            raised = None if candidate is None else candidate.failures[0]
            own = self._reference(None)
            assert own is not None  # its failure was raised
            if candidate is None or own.dtype is not torch.float64:
                reference = own
                candidate = self._candidate(reference)
                if raised is not None and not candidate.failures:
                    self.notes.append(
                        f"both ran in {dtype_name(reference.dtype)}, because the scheduled model raises in float64: "
                        f"{raised}"
                    )
        assert reference is not None
        assert candidate is not None
        if candidate.failures:
            self._raise_exception(reference, candidate)
        return self._judge(reference, candidate.value())

    # -- running ----------------------------------------------------------------------------------------------

    def _reference(self, dtype: torch.dtype | None) -> UntouchedRun | None:
        """Run the untouched model; None if it cannot run in ``dtype``.

        Raises:
            ArgumentError: it does not run in its own types either.
        """
        runs = UntouchedRuns(
            self.inputs, self.subjects, seed=self.options.seed, optimizer_steps=self.options.optimizer_steps
        )
        attempt = self.world.attempt(lambda: runs.run(dtype))
        if not attempt.failures:
            reference, own_rate = attempt.value()
            attempt = self.world.attempt(runs.late_stages(reference, min(self.world.gather(own_rate))))
        if attempt.failures:
            first = attempt.failures[0]
            if dtype is None:
                raise ArgumentError(
                    f"the untouched model itself fails on the example inputs: {first}",
                    hint="verify(sch, example_inputs) takes what model(...) takes: a mapping, a tuple, or one argument",
                ) from attempt.error
            self.notes.append(
                f"both ran in the model's own types, because the untouched one raises in float64: {first}"
            )
            return None
        return attempt.value()[0]

    def _candidate(self, reference: UntouchedRun) -> Attempt[tuple[Observation, Counterparts]]:
        dtype = reference.conditions.dtype

        def run() -> tuple[Observation, Counterparts]:
            make = lambda: self.subjects.candidate(dtype)  # noqa: E731
            return self._run_stages(make, self.subjects.counterparts, self.schedule, reference, reference.stages)

        return self.world.attempt(run)

    def _run_stages(
        self,
        make: Callable[[], nn.Module],
        counterparts: Counterparts,
        schedule: Schedule,
        reference: UntouchedRun,
        stages: Sequence[str],
    ) -> tuple[Observation, Counterparts]:
        conditions = dataclasses.replace(reference.conditions, adapt_output=_output_adapter(schedule))
        model = make()
        early = [stage for stage in stages if stage in EARLY]
        seen = run_stages(model, self.inputs, conditions, early) if early else Observation()
        for stage in stages:
            if stage not in early:
                seen.values.update(run_stages(make(), self.inputs, conditions, (stage,)).values)
        return seen, counterparts

    # -- judging ----------------------------------------------------------------------------------------------

    def _tolerance(self, reference: UntouchedRun, records: Sequence[Record]) -> Tolerance:
        promises = [record.primitive.equivalence for record in records]
        return Tolerance.of(reference.coarsest, promises, rtol=self.options.rtol, atol=self.options.atol)

    def _compare(
        self, reference: UntouchedRun, ran: tuple[Observation, Counterparts], records: Sequence[Record]
    ) -> Comparison:
        seen, counterparts = ran
        return compare(reference.seen, seen, counterparts, self._tolerance(reference, records))

    def _judge(self, reference: UntouchedRun, ran: tuple[Observation, Counterparts]) -> VerifyReport:
        records = self.schedule.records
        compared = self.world.attempt(lambda: self._compare(reference, ran, records))
        _reraise(compared)
        own = compared.value()
        first = [comparison.differences[0] if comparison.differences else None for comparison in self._shared(own)]
        if any(first):
            self._raise_difference(reference, first)
        shared = self._shared(own)
        return VerifyReport(
            model=type(self.schedule.model).__name__,
            steps_verified=len(records),
            world_size=self.world.size,
            dtype=dtype_name(reference.dtype),
            coarsest_dtype=dtype_name(reference.coarsest),
            tolerance=str(self._tolerance(reference, records)),
            optimizer_steps=self.options.optimizer_steps if "updates" in reference.stages else 0,
            largest=merge_largest([comparison.largest for comparison in shared]),
            not_compared=tuple(dict.fromkeys(text for comparison in shared for text in comparison.not_compared)),
            notes=(*self.notes, *reference.notes),
        )

    def _shared(self, own: Comparison) -> list[Comparison]:
        return self.world.gather(dataclasses.replace(own, differences=own.differences[:1]))

    def _raise_difference(self, reference: UntouchedRun, first: Sequence[Difference | None]) -> None:
        # Of the ranks that found one, the earliest kind decides: later ones are consequences.
        order = list(_STAGE_OF_KIND)
        rank, found = min(
            ((rank, one) for rank, one in zip(self.world.ranks, first, strict=True) if one is not None),
            key=lambda item: (order.index(item[1].kind), item[0]),
        )
        stage = _STAGE_OF_KIND[found.kind]
        stages = tuple(
            name for name in reference.stages if name == stage or (stage == "evaluation" and name == "training")
        )
        owner = None if "output" in found.kind or found.kind == "input gradient" else found.name.rpartition(".")[0]
        blame = self._blame(reference, stages, owner, raises=False)
        name = label(found.kind, found.name, self.options.optimizer_steps)
        where = f" on rank {rank}" if not self.world.is_alone else ""
        tolerance = self._tolerance(reference, self.schedule.records)
        raise VerifyError(
            f"the scheduled model differs from the untouched one, first in {name}{where}: {found.problem}\n"
            f"  allowed: {tolerance}\n{blame}" + "".join(f"\n  note: {note}" for note in self.notes),
            tensor=name,
            difference=found.largest,
            tolerance=found.allowed,
            rank=None if self.world.is_alone else rank,
            steps=[str(record) for record in blame.records],
            path=owner,
            hint=found.hint,
        )

    def _raise_exception(self, reference: UntouchedRun, candidate: Attempt[Any]) -> None:
        first = candidate.failures[0]
        blame = self._blame(reference, reference.stages, None, raises=True)
        where = f" on rank {first.rank}" if not self.world.is_alone else ""
        raise VerifyError(
            f"the scheduled model raises{where} where the untouched one does not: {first}\n{blame}",
            rank=None if self.world.is_alone else first.rank,
            steps=[str(record) for record in blame.records],
        ) from candidate.error

    def _blame(self, reference: UntouchedRun, stages: Sequence[str], near: str | None, *, raises: bool) -> Blame:
        def try_steps(part: Sequence[Record]) -> Outcome:
            return self._try(reference, stages, part, raises=raises)

        return find_steps(self.schedule.records, try_steps, near=near, tied=self.subjects.tied_modules())

    def _try(self, reference: UntouchedRun, stages: Sequence[str], part: Sequence[Record], *, raises: bool) -> Outcome:
        """Whether ``part`` alone fails as the whole schedule did; the same answer on every rank."""
        dtype = reference.conditions.dtype
        applied = self.world.attempt(lambda: self._trial(part))
        if applied.failures:
            return "refused"
        schedule, counterparts = applied.value()
        schedules = iter([schedule])

        def make() -> nn.Module:
            trial = next(schedules, None) or self.subjects.trial(part)
            return self.subjects.ready(trial, counterparts, dtype)

        ran = self.world.attempt(lambda: self._run_stages(make, counterparts, schedule, reference, stages))
        if ran.failures:
            return "differs" if raises else "other"
        compared = self.world.attempt(lambda: self._compare(reference, ran.value(), part))
        _reraise(compared)
        wrong = any(self.world.gather(bool(compared.value().differences)))
        if not wrong:
            return "agrees"
        return "other" if raises else "differs"

    def _trial(self, part: Sequence[Record]) -> tuple[Schedule, Counterparts]:
        schedule = self.subjects.trial(part)
        correspondence, _ = Correspondence.of(schedule)
        correspondence.check()
        return schedule, Counterparts.of(correspondence, schedule.model)


def _output_adapter(schedule: Schedule) -> Callable[[Any], Any]:
    """Ask the plugins whether this rank's output has to be gathered first."""

    def adapt(output: Any) -> Any:
        answer = schedule.hooks.single("slapo_gather_output", node=schedule.root, output=output)
        return output if answer is None else answer[1]

    return adapt
