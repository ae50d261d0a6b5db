"""Verify one schedule on all ranks: both models phase by phase, the comparison, and the verdict.

Values are released before the next phase, so that no more than one phase of each model is in memory: of a model
of float32 parameters, no more than 56 bytes a parameter.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import ArgumentError, InputError, VerifyError
from slapo_core.internals import describe
from slapo_runtime.ranks.consistency import SAME_SCRIPT, obligations, schedule_facts
from slapo_runtime.ranks.facts import RankFact, describe_tensor
from slapo_runtime.ranks.trial_groups import Failure
from slapo_runtime.ranks.world import Attempt, World
from slapo_runtime.schedule_copies import repeated
from slapo_verify.approximate import without_approximate_steps
from slapo_verify.blame import Blame
from slapo_verify.compare import Comparison, Difference
from slapo_verify.copies import Subjects, changed_outside, named_tensors
from slapo_verify.inputs import Batches, Inputs
from slapo_verify.kinds import EARLY, KINDS, OWN_TYPES, label, phases_for
from slapo_verify.phases import Observation, Runner
from slapo_verify.precision import dtype_name, is_inexact
from slapo_verify.refusals import refuse_unexplained, refuse_unsaid_freezing
from slapo_verify.report import Outcome, Siblings, VerifyReport, merge_largest
from slapo_verify.stages import CutFault, Staging, find_cut_fault, without_cuts
from slapo_verify.trials import Options, OtherRankError, ReferenceRun, Trials, Tried, reraise

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.primitive import Record

_OF_TYPES = re.compile(r"half|b?float16|[bf]p?16|dtype", re.I)
"""In messages of operators and kernels that do not take a type."""

_SAME_CALL = "make every rank build the same model (torch.manual_seed), and call verify with the same arguments"


def check_each(
    schedules: Sequence[Schedule], example_inputs: Any, options: Options, *, siblings: Siblings | None = None
) -> list[Outcome]:
    """Verify in this process, one schedule after the other, together with the other ranks of its mesh.

    Args:
        schedules: of one model; see :func:`slapo_core.verify`.
        example_inputs: one batch.
        options: of the call.
        siblings: all schedules of the call, where ``schedules`` are a part of them.
    """
    siblings = siblings or Siblings(schedules)
    outcomes: list[Outcome] = []
    for schedule in schedules:
        try:
            outcomes.append(_check(schedule, example_inputs, options, siblings))
        except VerifyError as error:
            if len(siblings.schedules) == 1 or isinstance(error, OtherRankError):
                raise
            outcomes.append(error)
    return outcomes


def _check(schedule: Schedule, example_inputs: Any, options: Options, siblings: Siblings) -> VerifyReport:
    def prepare() -> tuple[Inputs, Sequence[RankFact]]:
        inputs = Inputs.of(example_inputs)
        with schedule.reference() as reference_model:
            siblings.require_same_model(schedule, reference_model)
            return inputs, tuple(_facts(inputs, reference_model, options)) if schedule.mesh is not None else ()

    with World(schedule.mesh) as world:
        prepared = world.attempt(prepare)
        reraise(prepared)
        inputs, facts = prepared.value()
        world.agree(schedule_facts(schedule), hint=SAME_SCRIPT)
        world.agree((*siblings.facts(world.ranks), *facts), hint=_SAME_CALL)
        with world.trial_mesh(options.timeout) as mesh:

            def make() -> tuple[Subjects, str | None]:
                tried = schedule if mesh is schedule.mesh else repeated(schedule, mesh)
                changed = None if tried is schedule else changed_outside(schedule, tried)
                return Subjects(tried, device=inputs.device, seed=options.seed), changed

            made = world.attempt(make)
            reraise(made)
            subjects, changed = made.value()
            _refuse_changed(dict(zip(world.ranks, world.gather(changed), strict=True)))
            return Session(Trials(world, inputs, subjects, options, Staging())).run()


def _refuse_changed(by_rank: Mapping[int, str | None]) -> None:
    for rank, name in by_rank.items():
        if name is not None:
            raise VerifyError(
                f"'{name}' on rank {rank} differs from the result of the steps\n"
                "  no step causes it: it was changed outside of the schedule, after its first step",
                tensor=name,
                rank=rank,
                steps=[],
                hint=f"change the model before create_schedule(model), or by a step: sch['{name.rpartition('.')[0]}']"
                ".replace(...)",
            )


def _facts(inputs: Inputs, reference_model: nn.Module, options: Options) -> Iterator[RankFact]:
    """Yield everything besides the schedule that must be the same on every rank."""
    for name in ("rtol", "atol", "optimizer_steps", "seed"):
        yield RankFact(f"{name} given to verify", describe(getattr(options, name)))
    yield from inputs.facts()
    for number, batch in enumerate(options.more_batches, start=2):
        yield from batch.facts(f"batch {number}, input")
    for name, tensor in named_tensors(reference_model):
        yield RankFact(f"'{name}' of the reference model", describe_tensor(tensor))


class ReferenceRunError(Exception):
    """The reference model does not run in a type: nothing can be compared there."""

    def __init__(self, attempt: Attempt[Any], *, is_alone: bool) -> None:
        self.failure, self.error, self.is_alone = attempt.failures[0], attempt.error, is_alone
        super().__init__(str(self.failure))

    def refuse(self) -> ArgumentError:
        """Return the error where no other type is left."""
        where = "" if self.is_alone else f", on rank {self.failure.rank}"
        return ArgumentError(
            f"the reference model itself fails on the example inputs{where}: {self.failure}",
            hint="verify(sch, example_inputs) takes what model(...) takes: a mapping, a tuple, or one argument",
        )


class BothModels:
    """Runs both models in one type, phase by phase: run, compare, release.

    All ranks create it, and call the same methods in the same order.

    Args:
        trials: runs them.
        dtype: the type; None: the model's own types.

    Attributes:
        reference: how the reference model ran.
        comparison: this rank's.
        raised: where the scheduled model raised, or None.
        raised_for: the further batch that made it raise, e.g. ``"batch 2"``; "" for the given one.
        notes: what could not be compared.

    Raises:
        ReferenceRunError: on every rank.
    """

    reference: ReferenceRun

    def __init__(self, trials: Trials, dtype: torch.dtype | None) -> None:
        self.trials, self.world, self.dtype = trials, trials.world, dtype
        self.records = trials.subjects.schedule.records
        self.comparison = Comparison()
        self.notes: list[str] = []
        self.raised: Attempt[Any] | None = None
        self.raised_for = ""
        self._phases: tuple[str, ...] = EARLY
        self._withheld = self._found = frozenset[str]()  # in the runs of now, and by the scheduled model

    def run(self) -> BothModels:
        """Run all phases that apply to the model, the batch and the schedule."""
        self._run()
        self.reference.seen.values.clear()
        self.reference.phases = self._phases
        return self

    def run_early(self) -> BothModels:
        """Run the phases of outputs, buffers and gradients only."""
        self.reference, _, _ = self._reference(lambda: self.trials.start_reference(self.dtype, self._withheld))
        self._start()
        if self._withholds_more():
            self.run_early()
        self.reference.seen.values.clear()
        return self

    def _run(self) -> None:
        updates = self._reference_first()
        started = self._start()
        if self._withholds_more():
            del started
            self._run()
            return
        if started is None or any(self.world.gather(bool(self.comparison.differences))):
            return  # whatever differs later is a consequence
        runner, other_stream = started
        is_own = self.dtype is None or self.trials.own_dtype(self.trials.subjects.reference_model) is self.dtype
        if not is_own and self._add("the model's own types were not compared", OWN_TYPES):
            self._compare_phase(OWN_TYPES)  # right after the first phases, whose numbers tell how much rounding does
        self._release(but="updates")
        if self.raised is None and updates:
            self._compare_phase("updates", runner)
        elif not updates and self.trials.options.optimizer_steps:
            self.notes.append("no optimizer steps were compared, because no parameter has a finite gradient")
        del runner, started
        if self.raised is None:
            self._further_batches()
        differentiable = any(is_inexact(tensor) for _, tensor in self.trials.inputs.tensors())
        if differentiable and self.raised is None and self._add("gradients of the inputs were not compared", "inputs"):
            self._compare_phase("inputs")
        if self.raised is None:
            self._dropout(other_stream)

    # -- phases -----------------------------------------------------------------------------------------------

    def _reference_first(self) -> bool:
        """Run the reference phases on one copy, before the scheduled model is copied: this phase needs most memory.

        Gives whether there are updates among them.
        """
        self.reference, runner, rate = self._reference(lambda: self.trials.start_reference(self.dtype, self._withheld))
        rate = min(self.world.gather(rate))
        self._set_conditions(learning_rate=rate)
        updates = bool(self.trials.options.optimizer_steps and rate)
        if updates:
            self._reference(lambda: self.trials.add_reference(self.reference, "updates", runner))
        return updates

    def _start(self) -> tuple[Runner, str | None] | None:
        """Run the first phases of the scheduled model; return its runner, and why its RNG stream differs."""
        started = self.world.attempt(lambda: self.trials.start(self.trials.candidate, self.reference))
        if started.failures:
            self.raised = started
            return None
        runner, seen = started.value()
        self._found = self._withheld | self.trials.withheld(seen)
        if self._found == self._withheld:
            self._compare(seen)
            self.notes += dict.fromkeys(note for notes in self.world.gather(seen.notes) for note in notes)
        return runner, self.trials.other_stream(self.trials.candidate, self.reference, seen)

    def _withholds_more(self) -> bool:
        """Whether the scheduled model withholds outputs that the reference model was differentiated through."""
        more, self._withheld = self._found != self._withheld, self._found
        return more

    def _compare_phase(self, phase: str, runner: Runner | None = None, *, other_stream: bool = False) -> None:
        """Run a phase of the scheduled model and compare it."""
        self._phases = (*dict.fromkeys((*self._phases, phase)),)
        candidate = self.trials.candidate
        ran = self.world.attempt(lambda: self.trials.late(candidate, self.reference, phase, runner))
        self.raised = ran if ran.failures else None
        if self.raised is not None:
            return
        seen = ran.value()
        if phase == "dropout":
            self.trials.share_dropout(candidate, seen, other_stream=other_stream)
            self.notes += self.trials.advice(self.reference, seen)
        self._compare(seen)
        self._release(but="updates" if phase == OWN_TYPES else None)

    def _further_batches(self) -> None:
        """Compare your further batches, and variants of the given one where both models run: raising is not silent.

        All run on one copy, because state that a call keeps shows in the next one.
        """
        given = tuple((f"batch {number}", each) for number, each in enumerate(self.trials.options.more_batches, 2))
        variants, notes = self.trials.inputs.variants(self.trials.subjects.reference_model)
        self.notes += notes
        one = self.trials.inputs.of_one()
        ones = (one,) if one is not None else ()
        made: list[Batches] = [each for variant in variants for each in ((variant, *ones), (variant,))[: 1 + len(ones)]]
        held = ""
        for more in (*made, ones, ()):  # the best first
            why = self._compare_batches((*given, *more), is_given=not more)
            if not why:
                break
            note = f"{more[-1][0]} was not compared, because {why}"
            held = note if len(more) == 2 else ""
            self.notes += [] if held else [note]
        self.notes += [held] if held and self.raised is None else []

    def _compare_batches(self, batches: Batches, *, is_given: bool) -> str:
        """Compare the batches; return why not, if that is not an error: a variant was made here."""
        self._set_conditions(more_batches=batches)
        if not batches:
            return ""
        ran = self.world.attempt(lambda: self.trials.add_reference(self.reference, "batches"))
        if ran.failures and is_given:
            raise ReferenceRunError(ran, is_alone=self.world.is_alone)
        if ran.failures:
            return f"the reference model raises: {ran.failures[0].kind}: {ran.failures[0].text}"
        self._compare_phase("batches")
        raised = self.raised
        if raised is None:
            return ""
        if is_given or self.trials.contradicts_itself(raised):
            self.raised_for = " or ".join(called for called, _ in batches)
            return ""
        self.raised = None
        self._release()
        where = "" if self.world.is_alone else f" on rank {raised.failures[0].rank}"
        return f"the scheduled model raises{where}: {raised.failures[0]}"

    def _dropout(self, other_stream: str | None) -> None:
        drops = bool(self.reference.seen.of("dropout")["forward"])
        if drops and other_stream is not None:
            self.notes.append(f"outputs and gradients with dropout were not compared: {other_stream}")
        if drops or any(record.primitive.equivalence.is_random for record in self.records):
            self._reference(lambda: self.trials.add_reference(self.reference, "dropout"))
            self._compare_phase("dropout", other_stream=other_stream is not None)

    # -- helpers ----------------------------------------------------------------------------------------------

    def _reference(self, function: Callable[[], Any]) -> Any:
        attempt = self.world.attempt(function)
        if attempt.failures:
            raise ReferenceRunError(attempt, is_alone=self.world.is_alone)
        return attempt.value()

    def _add(self, what: str, phase: str) -> bool:
        """Add a phase that the reference model may not be able to run; note where it cannot."""
        attempt = self.world.attempt(lambda: self.trials.add_reference(self.reference, phase))
        for failure in attempt.failures[:1]:
            self.notes.append(f"{what}, because the reference model raises: {failure.kind}: {failure.text}")
        return not attempt.failures

    def _set_conditions(self, **changed: Any) -> None:
        self.reference.conditions = dataclasses.replace(self.reference.conditions, **changed)

    def _compare(self, seen: Observation) -> None:
        names = self.trials.subjects.counterparts
        self.comparison.add(self.trials.compare(self.reference, seen, names, self.records))

    def _release(self, but: str | None = None) -> None:
        values = self.reference.seen.values
        for kind in [each for each in values if each != "dropout" and (but is None or KINDS[each].phase != but)]:
            del values[kind]


class Session:
    """One verification of a schedule.

    Args:
        trials: runs both models.
    """

    def __init__(self, trials: Trials) -> None:
        self.trials, self.world, self.subjects = trials, trials.world, trials.subjects
        self.schedule = self.subjects.schedule
        self.notes: list[str] = []
        if self.subjects.frozen:
            self.notes.append(f"as the schedule says, in both models: {', '.join(self.subjects.frozen)}")

    def run(self) -> VerifyReport:
        """
        Raises:
            VerifyError: the models differ.
        """
        refuse_unexplained(self.world, self.subjects)
        self.notes += refuse_unsaid_freezing(self.world, self.subjects)
        own = self.trials.own_dtype(self.subjects.reference_model)
        dtypes: list[torch.dtype | None] = [torch.float64, torch.float32, None]
        if own in (torch.float32, torch.float64):
            dtypes.remove(torch.float32)
        raised: dict[str, list[str]] = {}  # what raises -> the types that it does not take
        tried: list[BothModels] = []
        for dtype in dtypes:
            try:
                both = BothModels(self.trials, dtype).run()
            except ReferenceRunError as error:
                if dtype is None:
                    raise error.refuse() from error.error
                raised.setdefault(f"the reference model raises: {error.failure}", []).append(dtype_name(dtype))
                continue
            tried.append(both)
            if both.raised is None or own is torch.float64 or OWN_TYPES in both.reference.phases:
                break
            if dtype is not None:
                failure = both.raised.failures[0]
                raised.setdefault(f"the scheduled model raises: {failure}", []).append(dtype_name(dtype))
        if both.raised is not None:
            first = _most_precise(tried, both.raised.failures[0])
            self._raise(first.reference, Tried.raising(first.raised), self.schedule.records, batch=first.raised_for)
        if raised:
            own_types = f"the model's own types ({dtype_name(both.reference.coarsest)})"
            why = (f"not in {' or '.join(dtypes)}, because {what}" for what, dtypes in raised.items())
            self.notes.append(f"compared in {own_types if dtype is None else dtype_name(dtype)}; {'; '.join(why)}")
        report = self._judge(both)
        self._judge_with_other_values(dtype)
        return dataclasses.replace(report, notes=tuple(dict.fromkeys((*self.notes, *both.notes))))

    def _judge(self, both: BothModels) -> VerifyReport:
        records, reference = self.schedule.records, both.reference
        found = self.trials.conclude(both.comparison)
        if not found.agrees:
            self._raise(reference, found, records)
        self._judge_beside_approximate_steps(reference)
        shared = self.world.gather(both.comparison)
        return VerifyReport(
            model=type(self.schedule.model).__name__,
            steps_verified=len(records),
            world_size=self.world.size,
            dtype=dtype_name(reference.dtype),
            coarsest_dtype=dtype_name(reference.coarsest),
            tolerance=str(self.trials.tolerance(reference, records)),
            optimizer_steps=self.trials.options.optimizer_steps if "updates" in reference.phases else 0,
            largest=merge_largest([comparison.largest for comparison in shared]),
            not_compared=tuple(dict.fromkeys(text for comparison in shared for text in comparison.not_compared)),
            notes=(*self.notes, *both.notes),
        )

    def _judge_with_other_values(self, dtype: torch.dtype | None) -> None:
        """Compare outputs and gradients again, with random values where the model's own hide mistakes."""
        drawn = self.subjects.redraw_constants()
        if not drawn:
            return
        what = f"{len(drawn)} parameters that are constant or small, e.g. '{drawn[0]}', as random values"
        try:
            both = BothModels(self.trials, dtype).run_early()
        except ReferenceRunError as error:
            self.notes.append(f"not compared with {what}: the reference model raises: {error.failure}")
            return
        note = f"compared once more with {what}"
        self.notes.append(note)  # for the message of an error
        if both.raised is not None:
            self._raise(both.reference, Tried.raising(both.raised), self.schedule.records)
        self._judge(both)
        self.notes.remove(note)

    def _judge_beside_approximate_steps(self, reference: ReferenceRun) -> None:
        """Check the steps that are not approximate under their own promises."""
        hidden = without_approximate_steps(self.trials, reference, self.schedule.records)
        if hidden is None:
            return
        if hidden.note:
            self.notes.append(hidden.note)
        if hidden.found is not None:
            left_out = ", ".join(f"#{record.index}" for record in hidden.left_out)
            self.notes.append(f"compared without {left_out}, because the tolerance of approximate steps hides it")
            self._raise(hidden.reference, hidden.found, hidden.rest)

    # -- raising ----------------------------------------------------------------------------------------------

    def _raise(self, reference: ReferenceRun, tried: Tried, records: Sequence[Record], *, batch: str = "") -> None:
        """
        Raises:
            VerifyError: that names the steps which make the scheduled model differ, or raise.
            InputError: every rank raised it; it names the step's place and the way out itself.
        """
        failures = tried.raised.failures if tried.raised is not None else []
        if len(failures) == self.world.size and all(failure.kind == InputError.__name__ for failure in failures):
            assert tried.raised is not None
            reraise(tried.raised)
        phases = reference.phases if tried.first is None else phases_for(tried.first[1].kind)
        again = self.trials.again(reference, phases)
        fault: CutFault | None = None
        if self._is_cut():
            whole = self.trials.without_stages(again, phases, records)
            if whole.agrees and tried.raised is not None and self.trials.was_refused(tried.raised):
                reraise(tried.raised)
            if whole.agrees:
                kind = tried.first[1].kind if tried.first is not None else None
                error = tried.raised.error if tried.raised is not None else None
                fault = find_cut_fault(self.trials, again, records, kind=kind, error=error)
            else:
                records = without_cuts(self.trials, records)
                self.trials = dataclasses.replace(self.trials, staging=None)
                tried = tried if whole.outcome == "refused" else whole
        phases = self._phases_of(again, tried)
        rank, found = tried.first or (tried.failures[0].rank, None)
        owner = _owner(found) if found is not None else None
        blame: Blame | CutFault | None = fault
        if blame is None and found is not None and found.by:
            blame = Blame.by_place([record for record in records if record.index in found.by])
        elif blame is None:
            blame = self.trials.blame(again, phases, tried, near=owner, records=records)
        where = "" if self.world.is_alone else f" on rank {rank}"
        known: dict[str, Any] = {
            "rank": None if self.world.is_alone else rank,
            "steps": [str(record) for record in blame.records],
            "plugin": fault.plugin if fault is not None else None,
        }
        missing = "".join(f"\n  missing: {violation}" for violation in obligations(self.schedule))
        if tried.raised is not None:
            first, *others = tried.failures
            others = [other for other in others if (other.kind, other.where) != (first.kind, first.where)]
            also = "".join(f"\n  and on rank {other.rank}: {other}" for other in others)
            where = (f" for {batch}" if batch else "") + where
            raise VerifyError(
                f"the scheduled model raises{where} where the reference model does not: {first}{also}\n"
                f"{blame}{missing}",
                hint=self._autocast_call(again) if _OF_TYPES.search(first.text) else None,
                **known,
            ) from tried.raised.error
        assert found is not None
        name = label(found.kind, found.name, self.trials.options.optimizer_steps)
        if found.kind == "batch gradient":  # outputs have their batch in their names
            called = ", ".join(called for called, _ in again.conditions.more_batches)
            self.notes.append(f"further batches: {called}")
        self.notes += self._full_beside_shards(found, blame)
        raise VerifyError(
            f"the scheduled model differs from the reference model, first in {name}{where}: {found.problem}\n"
            f"  allowed: {found.rule or self.trials.tolerance(again, records)}\n{blame}{missing}"
            + "".join(f"\n  note: {note}" for note in self.notes),
            tensor=name,
            difference=found.largest,
            tolerance=found.allowed,
            path=owner,
            hint=found.hint,
            **known,
        )

    def _phases_of(self, reference: ReferenceRun, tried: Tried) -> tuple[str, ...]:
        """Find the fewest phases that show the failure."""
        if tried.first is not None:
            return phases_for(tried.first[1].kind)
        early = self.trials.run(self.trials.candidate, reference, EARLY)
        return EARLY if early.failures else reference.phases

    def _autocast_call(self, reference: ReferenceRun) -> str | None:
        """Return the call under autocast, if a model of float32 runs there, e.g. with kernels of half precision."""
        kind = self.subjects.device.type
        own = self.trials.own_dtype(self.subjects.reference_model)
        if own is not torch.float32 or torch.is_autocast_enabled(kind):
            return None
        conditions = dataclasses.replace(reference.conditions, dtype=None)
        with torch.autocast(kind, torch.bfloat16):
            ran = self.trials.run(self.trials.candidate, dataclasses.replace(reference, conditions=conditions), EARLY)
        call = f"with torch.autocast('{kind}', torch.bfloat16): slapo.verify(sch, batch)"
        return None if ran.failures else f"it runs under autocast; if you train so: `{call}`"

    def _full_beside_shards(self, found: Difference, blame: Blame | CutFault) -> list[str]:
        """List parameters that a reduction at a module of unknown type may add once per rank."""
        if self.world.is_alone or "output" not in found.kind:
            return []
        paths = dict.fromkeys(record.path for record in blame.records)
        full = [name for path in paths for name in self.subjects.counterparts.full_beside_shards(path)]
        names = " and ".join(map(repr, full))
        return [f"every rank holds the full {names}: added to a partial sum, it counts once for each rank"] * bool(full)

    def _is_cut(self) -> bool:
        """Return whether stages were made or refused on any rank."""
        staging = self.trials.staging
        return any(self.world.gather(staging is not None and staging.is_needed))


def _most_precise(tried: Sequence[BothModels], last: Failure) -> BothModels:
    """Return the first run that raises as the last one did: with the least rounding."""
    raised = ((both, both.raised.failures[0]) for both in tried if both.raised is not None)
    return next(both for both, found in raised if (found.kind, found.where) == (last.kind, last.where))


def _owner(found: Difference) -> str | None:
    """Return the module of a difference; None for the model itself."""
    if "output" in found.kind or found.kind == "input gradient":
        return None
    return found.name if "dropout" in found.kind and "gradient" not in found.kind else found.name.rpartition(".")[0]
