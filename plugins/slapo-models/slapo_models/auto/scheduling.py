"""Schedule a model automatically: record, propose, try, apply."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slapo_core import Mesh, create_schedule
from slapo_core.errors import ArgumentError, SlapoError
from slapo_core.internals import caller_location
from slapo_models.auto.axes import Axis
from slapo_models.auto.candidates import Candidate, Step, Together, candidates, prove, steps
from slapo_models.auto.finish import finish
from slapo_models.auto.hints import compared
from slapo_models.auto.operators import infer
from slapo_models.auto.placement import Graph, LeftWhole
from slapo_models.auto.recording import PARAMETER, Recording, Value, record, without_memory
from slapo_models.auto.repetition import Plan, Repetition, Split
from slapo_models.auto.report import AutoReport
from slapo_models.auto.sequence import plan_sequence, with_sequence
from slapo_models.auto.situations import Situation, further_situations
from slapo_models.auto.slices import SequencePlan
from slapo_models.auto.trial import Trial, apply
from slapo_models.auto.vocabulary import vocabularies

if TYPE_CHECKING:
    from torch import nn

    import slapo_core as slapo


def schedule_automatically(
    sch: slapo.Schedule,
    example_inputs: Any,
    *,
    memory: int | str | None,
    kernels: bool | Sequence[str],
    sequence_parallel: bool = False,
) -> AutoReport:
    """Apply the steps: see :func:`slapo_models.auto`."""
    inputs = sch.example_inputs if example_inputs is None else example_inputs
    if inputs is None:
        raise ArgumentError("auto needs one batch", hint="auto(sch, batch), or create_schedule(..., example_inputs=)")
    if sch.records:
        raise ArgumentError(f"the schedule has {len(sch.records)} steps", hint="call auto first, then add steps")
    if sequence_parallel and sch.mesh is not None and "pp" in sch.mesh and sch.mesh.size("pp") > 1:
        raise ArgumentError(
            "auto(sequence_parallel=True) makes no stages: it gathers the sequence behind the module that is to be cut",
            hint="a mesh without 'pp', or auto(sch) without sequence_parallel",
        )
    split = functools.partial(split_tensors, sequence_parallel=sequence_parallel)
    report = compared(split(sch, inputs), sch)
    return replace(report, notes=(*report.notes, *finish(sch, inputs, split=split, memory=memory, kernels=kernels)))


def split_tensors(sch: slapo.Schedule, inputs: Any, *, sequence_parallel: bool = False) -> AutoReport:
    """Apply the steps of tensor parallelism, and of sequence parallelism where asked for."""
    ranks = sch.mesh.size("tp") if sch.mesh is not None and "tp" in sch.mesh else 1
    if ranks == 1:
        return AutoReport((), {}, (), ("mesh_dim 'tp' has one rank: nothing to split",))
    assert sch.mesh is not None
    location = caller_location("slapo_models")
    copied = without_memory(sch.model)
    recording = _recorded(copied, inputs)
    repetition = None if sequence_parallel else Repetition.of(copied, inputs, recording)
    if repetition is not None:
        few = create_schedule(without_memory(repetition.model), mesh=Mesh(sch.mesh.sizes), example_inputs=inputs)
        plan = repetition.expanded(_plan(few, repetition.model, repetition.recording, inputs, None))
        if plan is not None:
            for step in plan.steps:
                apply(sch, step, location)
            return plan.report
    return _plan(sch, copied, recording, inputs, location, sequence_parallel=sequence_parallel).report


def _plan(
    sch: slapo.Schedule,
    copied: nn.Module,
    recording: Recording,
    inputs: Any,
    location: str | None,
    *,
    sequence_parallel: bool = False,
) -> Plan:
    """Find the steps of tensor parallelism, and apply them.

    Args:
        sch: the schedule.
        copied: its model, without memory.
        recording: of it.
        inputs: one batch.
        location: of the steps.
        sequence_parallel: whether slices of the sequence are found too; the plan's steps are without them.
    """
    assert sch.mesh is not None
    ranks = sch.mesh.size("tp")
    graph = Graph(recording, infer(recording))
    others, assumptions = further_situations(copied, inputs, graph)
    reasons: dict[Value, str] = {}
    failures: dict[Axis, str] = {}
    taken: set[Value] = set()
    proved: list[Candidate] = []
    together = Together(graph)
    for candidate in candidates(graph, ranks):
        if not taken.isdisjoint(candidate.members):
            continue
        try:
            prove(graph, candidate)
            for other in others:
                other.prove(candidate)
            together.add(candidate)
        except LeftWhole as reason:
            for leaf in candidate.leaves:
                failures.setdefault(leaf, str(reason))
            continue
        taken.update(candidate.members)
        proved.append(candidate)
    order = {value: number for number, value in enumerate(dict.fromkeys(recording.values.values()))}
    proved.sort(key=lambda each: order[each.members[0]])
    own = {each: steps(each) for each in proved}
    trial = Trial(sch.model, sch.mesh.sizes, inputs, graph, others)
    attributes, failed = trial.settle(proved, own)
    for each, text in failed.items():
        taken.difference_update(each.members)
        reasons.update(dict.fromkeys(each.members, text))
    splits = tuple(
        Split(tuple(map(_path, each.members)), (*own[each], *attributes[each])) for each in proved if each not in failed
    )
    for step in (step for split in splits for step in split.steps):
        apply(sch, step, location)
    vocabulary: list[Step] = []
    for value, found in vocabularies(graph):
        if isinstance(found, LeftWhole) or together.leaves_partial(value):
            reasons[value] = str(found) if isinstance(found, LeftWhole) else "the gradient of its rows is partial"
            continue
        before = len(sch.records)
        try:
            for step in found:
                apply(sch, step, location)
            taken.add(value)
            vocabulary += found
        except SlapoError as error:
            sch.undo(to=before)
            reasons[value] = " ".join(error.message.split())
    recording.assumptions.update(assumptions)
    read = [value for value in recording.values.values() if value.origin == PARAMETER and value.uses]
    if not all(value.needs_gradient for value in read):
        recording.assumptions["frozen parameters stay frozen: a gradient that only they need is not summed"] = None
    plan = Plan(splits, tuple(vocabulary), _report(recording, taken, reasons, failures, ranks))
    if not sequence_parallel:
        return plan
    kept = [each for each in proved if each not in failed]
    slices, in_sequence = _in_sequence(graph, kept, others, list(plan.steps), trial)
    if slices.scattered:
        sch.undo(to=0)
        for step in in_sequence:
            apply(sch, step, location)
    return replace(plan, report=replace(plan.report, scattered=tuple(slices.scattered), all_reduced=slices.kept))


def _in_sequence(
    graph: Graph, kept: list[Candidate], others: list[Situation], applied: Sequence[Step], trial: Trial
) -> tuple[SequencePlan, list[Step]]:
    """Return the collectives of sequence parallelism, and all steps with them."""
    heads = [step.path for step in applied if step.arguments == ("bwd_post", "all_reduce")]
    heads = [path for path in heads if all(path not in each.placement.gradients for each in kept)]
    plan: SequencePlan | None = None
    while True:
        plan, regions = plan_sequence(graph, kept, others, heads, trial.ranks, plan)
        found = with_sequence(plan, applied, graph)
        mismatch = trial.check(found, regions, kept) if plan.scattered else None
        if mismatch is None:
            return plan, found
        if not plan.blame(mismatch.expected, regions, mismatch.what):
            plan.keep_all(mismatch.what)
            return plan, found


def _recorded(model: nn.Module, inputs: Any) -> Recording:
    try:
        return record(model, inputs)
    except SlapoError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise ArgumentError(
            f"the model cannot be recorded on these inputs: {type(error).__name__}: {text}",
            hint="give one batch as verify takes it",
        ) from error


def _report(
    recording: Recording, taken: set[Value], reasons: dict[Value, str], failures: dict[Axis, str], ranks: int
) -> AutoReport:
    split, left = [], {}
    for value in dict.fromkeys(recording.values.values()):
        path = _path(value)
        if value in taken:
            split.append(path)
        elif value.origin == PARAMETER and len(value.shape) > 1:
            left[path] = reasons.get(value) or _reason(value, failures, ranks)
    return AutoReport(tuple(split), left, tuple(recording.assumptions))


def _path(value: Value) -> str:
    return ".".join(filter(None, value.names[0]))


def _reason(value: Value, failures: dict[Axis, str], ranks: int) -> str:
    """Say for each part of a matrix's axes why it is not split."""
    if not value.uses:
        return "the forward does not read it"
    found: dict[str, None] = {}
    for leaf in (leaf for axis in value.axes for leaf in axis.leaves()):
        if leaf.reasons:
            found[f"{next(iter(leaf.reasons))} needs all {leaf.size}"] = None
        elif leaf in failures:
            found[f"{leaf.size}: {failures[leaf]}"] = None
        elif leaf.size % ranks:
            found[f"{leaf.size} is not divisible by {ranks}"] = None
    return "; ".join(list(found)[:4]) or "another axis of it would be split"
