"""Schedule a model automatically: record, propose, try, apply."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ArgumentError, SlapoError
from slapo_core.internals import caller_location
from slapo_models.auto.axes import Axis
from slapo_models.auto.candidates import Candidate, Step, Together, candidates, prove, steps
from slapo_models.auto.finish import finish
from slapo_models.auto.hints import compared
from slapo_models.auto.operators import infer
from slapo_models.auto.placement import Graph, LeftWhole
from slapo_models.auto.recording import PARAMETER, Recording, Value, record, without_memory
from slapo_models.auto.report import AutoReport
from slapo_models.auto.sequence import plan_sequence, with_sequence
from slapo_models.auto.situations import Situation, further_situations
from slapo_models.auto.slices import Plan
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
            failures.update(dict.fromkeys(candidate.leaves, str(reason)))
            continue
        taken.update(candidate.members)
        proved.append(candidate)
    own = {each: steps(each) for each in proved}
    trial = Trial(sch.model, sch.mesh.sizes, inputs, graph, others)
    attributes, failed = trial.settle(proved, own)
    for each, text in failed.items():
        taken.difference_update(each.members)
        reasons.update(dict.fromkeys(each.members, text))
    applied: list[Step] = []
    for each in proved:
        if each not in failed:
            applied += [*own[each], *attributes[each]]
    for step in applied:
        apply(sch, step, location)
    for value, found in vocabularies(graph):
        if isinstance(found, LeftWhole) or together.leaves_partial(value):
            reasons[value] = str(found) if isinstance(found, LeftWhole) else "the gradient of its rows is partial"
            continue
        before = len(sch.records)
        try:
            for step in found:
                apply(sch, step, location)
            taken.add(value)
            applied += found
        except SlapoError as error:
            sch.undo(to=before)
            reasons[value] = " ".join(error.message.split())
    recording.assumptions.update(assumptions)
    report = _report(recording, taken, reasons, failures, ranks)
    if not sequence_parallel:
        return report
    plan, in_sequence = _in_sequence(graph, [each for each in proved if each not in failed], others, applied, trial)
    if plan.scattered:
        sch.undo(to=0)
        for step in in_sequence:
            apply(sch, step, location)
    return replace(report, scattered=tuple(plan.scattered), all_reduced=plan.kept)


def _in_sequence(
    graph: Graph, kept: list[Candidate], others: list[Situation], applied: list[Step], trial: Trial
) -> tuple[Plan, list[Step]]:
    """Return the collectives of sequence parallelism, and all steps with them."""
    heads = [step.path for step in applied if step.arguments == ("bwd_post", "all_reduce")]
    heads = [path for path in heads if all(path not in each.placement.gradients for each in kept)]
    plan: Plan | None = None
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
        path = ".".join(filter(None, value.names[0]))
        if value in taken:
            split.append(path)
        elif value.origin == PARAMETER and len(value.shape) > 1:
            left[path] = reasons.get(value) or _reason(value, failures, ranks)
    return AutoReport(tuple(split), left, tuple(recording.assumptions))


def _reason(value: Value, failures: dict[Axis, str], ranks: int) -> str:
    """Say for each part of a matrix's axes why it is not split."""
    if not value.uses:
        return "the forward does not read it"
    found: dict[str, None] = {}
    for leaf in (leaf for axis in value.axes for leaf in axis.leaves()):
        if leaf.reasons:
            found[f"{next(iter(leaf.reasons))} needs all {leaf.size}"] = None
        elif leaf.size % ranks:
            found[f"{leaf.size} is not divisible by {ranks}"] = None
        elif leaf in failures:
            found[f"{leaf.size}: {failures[leaf]}"] = None
    return "; ".join(list(found)[:4]) or "another axis of it would be split"
