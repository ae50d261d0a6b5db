"""Run a cut model stage by stage, and find the wrong cut."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from slapo_core.errors import HookError, TraceError
from slapo_core.internals import Internals, ScheduledCopy, buffers_of, copies, module_index
from slapo_runtime.batches import bound_call
from slapo_runtime.stages import StagedModel, staged
from slapo_runtime.stages.partition import Partition
from slapo_runtime.stages.signatures import InputSignature
from slapo_verify.compare import fingerprint
from slapo_verify.inputs import Batch
from slapo_verify.kinds import KINDS
from slapo_verify.phases import Caller, Runner
from slapo_verify.private import pytree
from slapo_verify.search import record_lines

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.primitive import Record
    from slapo_verify.trials import ReferenceRun, ScheduleTrials


# `StagedCalls`: the stages of one scheduled model, made once for every input signature and every mode.


class StagedCalls:
    """Ask the plugins for stages, and keep them.

    Args:
        schedule: its model is in the mode in which it is to run whenever stages are asked for.
        answers: shared by the copies of one model.
    """

    def __init__(self, schedule: ScheduledCopy, *, answers: Answers) -> None:
        self._schedule, self._answers = schedule, answers
        self._known: list[tuple[InputSignature, StagedModel | None]] = []

    def of(self, inputs: Mapping[str, Any]) -> StagedModel | None:
        """Return the stages for a call; None where no plugin cuts the model.

        Args:
            inputs: the arguments of the model's forward, by parameter.

        Raises:
            TraceError: it cannot be cut there.
            HookError: a plugin's answer is invalid, or contradicts that for a batch of another size.
        """
        signature = InputSignature(inputs, [module.training for module in self._schedule.model.modules()])
        for known, stages in self._known:
            if known == signature:
                return stages
        made = self._answers.of_copies(self._schedule, signature)
        if made is None:
            made = staged(self._schedule, inputs)
            if made is not None:
                self._answers.add(self._schedule, signature, made)
        self._known.append((signature, made))
        return made


class Answers:
    """Keep stages of one model's copies, to bind them to further copies."""

    def __init__(self) -> None:
        self._known: list[tuple[Sequence[Record], Any, InputSignature, StagedModel]] = []

    def of_copies(self, schedule: ScheduledCopy, signature: InputSignature) -> StagedModel | None:
        """Bind stages of another copy with the same records and input signature to this copy.

        Args:
            schedule: of this copy.
            signature: of the batch, and the modes.
        """
        structured = module_index.structure(schedule.model)
        records = [*map(id, schedule.records)]
        for steps, known_structure, known, made in self._known:
            if known_structure == structured and known == signature and [*map(id, steps)] == records:
                partition = made.partition
                models = [schedule.model] * len(partition.stages)
                bound = partition.bind(models) if partition.bind is not None else None
                if bound is not None:
                    return dataclasses.replace(made, partition=bound)
        return None

    def add(self, schedule: ScheduledCopy, signature: InputSignature, made: StagedModel) -> None:
        """Keep an answer."""
        self._known.append((schedule.records, module_index.structure(schedule.model), signature, made))


# The stages of one model, each with modules of its own: like processes they share parameters and buffers at most.


class IsolatedStagedCalls:
    """Make each stage of another copy of the modules, with the same tensors.

    State that modules keep in attributes does not pass from one stage to the next then, as it would not between
    processes; gradients and the optimizer's steps are the one model's. The plugins are asked about every copy, as they
    are on every rank, and must give the same answer.

    Args:
        schedule: with the cuts.
        model: a private copy of its model; the first stage is made of it.
        answers: see :class:`~slapo_verify.stages.StagedCalls`.
    """

    def __init__(self, schedule: Schedule, model: nn.Module, *, answers: Answers) -> None:
        self._schedule, self._model, self._answers = schedule, model, answers
        self._calls = [StagedCalls(ScheduledCopy(schedule, model), answers=self._answers)]
        self.copies: list[nn.Module] = []
        self._pairs: list[tuple[nn.Module, nn.Module]] = []  # what stands in a copy for a module of the model

    def of(self, inputs: Mapping[str, Any]) -> StagedModel | None:
        """Return the stages for a call; None where no plugin cuts the model.

        Raises:
            HookError: a plugin says something else about another copy, too.
        """
        first = self._calls[0].of(inputs)
        if first is None:
            return None
        while len(self._calls) < len(first.partition.stages):
            made = _around_the_same_tensors(self._model)
            self.copies.append(made)
            self._pairs += zip(self._model.modules(), made.modules(), strict=True)
            self._calls.append(StagedCalls(ScheduledCopy(self._schedule, made), answers=self._answers))
        for ours, theirs in self._pairs:
            theirs.training = ours.training
        models = [self._model, *self.copies[: len(first.partition.stages) - 1]]
        bound = first.partition.bind(models) if first.partition.bind is not None else None
        if bound is not None:
            return dataclasses.replace(first, partition=bound)
        found = [first, *(calls.of(inputs) for calls in self._calls[1 : len(first.partition.stages)])]
        for other in found:
            if other is None or _as_data(other) != _as_data(first):
                raise HookError(
                    f"{first.partition_by} and {first.liveness_by} make other stages of another copy of the same "
                    "model, and so would on another rank",
                    plugin=first.partition_by,
                    hint="let names and their order follow from the model and the schedule alone",
                )
        stages = tuple(each.partition.stages[number] for number, each in enumerate(found) if each is not None)
        return dataclasses.replace(first, partition=dataclasses.replace(first.partition, stages=stages))

    def take_back(self, staged: StagedModel) -> None:
        """Give the model the buffers that its stages replaced."""
        for stage in staged.partition.stages[1:]:
            for name, buffer in stage.module.named_buffers():
                path, _, own = name.rpartition(".")
                try:
                    owner = self._model.get_submodule(path)
                except AttributeError:  # a constant of the stage's own
                    continue
                if own in buffers_of(owner):
                    buffers_of(owner)[own] = buffer


def _around_the_same_tensors(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copies.deep_copy(model, memo)


def _as_data(staged: StagedModel) -> Any:
    """Return the stages' declaration, without modules."""
    partition: Partition = staged.partition
    stages = [(each.index, each.inputs, each.uses, each.makes, each.last) for each in partition.stages]
    return stages, list(partition.values.items()), partition.ties, partition.output.names, staged.liveness


T = TypeVar("T")


class Staging:
    """Call the scheduled models of one verification stage by stage.

    Attributes:
        last: the stages that were made last; None as long as no plugin has cut a model.
        refusals: class and text of plugins' errors about stages.
        answers: of plugins, shared by copies.
    """

    def __init__(self) -> None:
        self.last: StagedModel | None = None
        self.refusals: set[tuple[str, str]] = set()
        self.answers = Answers()

    @property
    def is_needed(self) -> bool:
        """Return whether a plugin has cut a model, or has refused to."""
        return self.last is not None or bool(self.refusals)

    def caller(self, schedule: Schedule, model: nn.Module, *, apart: bool = False) -> Caller:
        """Make the caller of a copy, stage by stage where it is cut.

        Args:
            schedule: with the cuts.
            model: a copy of its model.
            apart: whether every stage gets modules of its own; that takes as many recordings as there are stages.
        """
        if not Internals(schedule).hooks.has("slapo_partition"):
            return Caller(model)
        return _StagedCaller(self, schedule, model, apart=apart)

    def noting_refusals(self, function: Callable[[], T]) -> T:
        """Call a function, and note its refusals."""
        try:
            return function()
        except (HookError, TraceError) as error:
            self.refusals.add((type(error).__name__, str(error)))
            raise


class _StagedCaller(Caller):
    def __init__(self, staging: Staging, schedule: Schedule, model: nn.Module, *, apart: bool) -> None:
        super().__init__(model)
        self._staging = staging
        self._apart = IsolatedStagedCalls(schedule, model, answers=staging.answers) if apart else None
        self._calls = self._apart or StagedCalls(ScheduledCopy(schedule, model), answers=staging.answers)

    def __call__(self, batch: Batch) -> Callable[[], Any]:
        known = len(self._apart.copies) if self._apart else 0
        inputs = bound_call(self.model, batch.args, batch.kwargs)
        stages = self._staging.noting_refusals(lambda: self._calls.of(inputs))
        for made in self._apart.copies[known:] if self._apart else ():
            self.add(made)
        if stages is None:
            return super().__call__(batch)
        self._staging.last = stages
        return lambda: self._staging.noting_refusals(lambda: self._run(stages, inputs))

    def _run(self, stages: StagedModel, inputs: dict[str, Any]) -> Any:
        try:
            return stages.run(inputs)
        finally:
            if self._apart:
                self._apart.take_back(stages)


_CLOSE = 1e-6
CallKey = tuple[str, int]
Fingerprints = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class OtherCall:
    """Describe a module's call that differs in the second run.

    Args:
        path: of the module.
        how: in words, e.g. ``"gets different inputs"``.
        in_backward: whether only its gradient is another.
    """

    path: str
    how: str
    in_backward: bool = False


class SeenCalls:
    """Record two numbers of every module call's inputs, outputs and gradients.

    Args:
        modules: with their paths; of private copies.
        but: paths of modules to skip.

    Attributes:
        given: inputs of each call (path and number), in order.
        gave: outputs likewise.
        gradients: of each call's outputs, by position.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], *, but: Collection[str]) -> None:
        self.given: dict[CallKey, Fingerprints] = {}
        self.gave: dict[CallKey, Fingerprints] = {}
        self.gradients: dict[CallKey, dict[int, Fingerprints]] = {}
        self._open: list[CallKey] = []
        self._modules = [(path, module) for path, module in modules if path and path not in but]
        self._handles: list[Any] = []

    def __enter__(self) -> SeenCalls:
        for path, module in self._modules:
            before = module.register_forward_pre_hook(functools.partial(self._before, path), with_kwargs=True)
            self._handles += [before, module.register_forward_hook(self._after)]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        number = 0
        while (path, number) in self.given:
            number += 1
        self.given[path, number] = _fingerprints((args, kwargs))
        self._open.append((path, number))

    def _after(self, _: nn.Module, __: Any, output: Any) -> None:
        call = self._open.pop()
        self.gave[call] = _fingerprints(output)
        for number, tensor in enumerate(_tensors(output)):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._keep, call, number))

    def _keep(self, call: CallKey, number: int, gradient: torch.Tensor) -> None:
        self.gradients.setdefault(call, {})[number] = _fingerprints(gradient)


def first_other_call(one: SeenCalls, other: SeenCalls) -> OtherCall | None:
    """Find the first call, or the last gradient, that differs in ``other``.

    Args:
        one: the first run.
        other: the second run.
    """
    for call, given in one.given.items():
        path, number = call
        if call not in other.given:
            return OtherCall(path, "is not called" + (" again" if number else ""))
        if not _close(given, other.given[call]):
            return OtherCall(path, "gets different inputs")
        if not _close(one.gave[call], other.gave[call]):
            return OtherCall(path, "gets the same inputs and returns something else")
    for call in reversed(one.given):
        theirs = other.gradients.get(call, {})
        for number, seen in one.gradients.get(call, {}).items():
            if not _close(seen, theirs.get(number, ())):
                how = "gets no gradient" if number not in theirs else "gets a different gradient"
                return OtherCall(call[0], how, in_backward=True)
    return None


def _close(one: Fingerprints, other: Fingerprints) -> bool:
    if len(one) != len(other):
        return False
    pairs = [(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    return all(a == b or abs(a - b) <= _CLOSE * max(abs(a), abs(b), 1e-12) or (a != a and b != b) for a, b in pairs)


def _fingerprints(value: Any) -> Fingerprints:
    return tuple(fingerprint(tensor) for tensor in _tensors(value))


def _tensors(value: Any) -> list[torch.Tensor]:
    """List the tensors of a value, without objects that are not pytrees."""
    plain = dict(value) if isinstance(value, Mapping) else value
    return [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, torch.Tensor)]


def without_cuts(trials: ScheduleTrials, records: Sequence[Record]) -> tuple[Record, ...]:
    """List the steps to blame without the cuts: not those that only cut."""
    staged = trials.staging.last if trials.staging is not None else None
    boundaries = range(len(staged.partition.stages) - 1) if staged is not None else ()
    cuts = {record.index for at in boundaries if staged is not None for record in _cuts(staged, at, records)}
    return tuple(record for record in records if record.index not in cuts)


@dataclass(frozen=True)
class CutFault:
    """Describe a mistake of the stages, where the uncut schedule agrees.

    Args:
        records: the steps that cut at the first difference; all that cut, if it is not known.
        lines: further details.
        plugin: that made the stages.
    """

    records: tuple[Record, ...]
    lines: tuple[str, ...]
    plugin: str | None

    def __str__(self) -> str:
        shown = record_lines(self.records)
        head = "  the stages cause it: without the cuts, the same schedule agrees with the reference model"
        return "\n".join([head, *shown, *(f"  {line}" for line in self.lines)])


def find_cut_fault(
    trials: ScheduleTrials,
    reference: ReferenceRun,
    records: Sequence[Record],
    *,
    kind: str | None,
    error: BaseException | None,
) -> CutFault:
    """Find the wrong stage of a schedule that agrees without cuts.

    Args:
        trials: that found the failure.
        reference: with the conditions of the run.
        records: the steps.
        kind: of the first difference; None if the stages raise.
        error: of the stages on this rank.
    """
    staging = trials.staging
    assert staging is not None
    place, notes = None, list(getattr(error, "__notes__", ()))
    if kind is not None:
        attempt = trials.world.attempt(lambda: _other_call(trials, staging, reference, kind))
        place = attempt.result if not attempt.failures else None
    seen = trials.world.gather((place, notes))
    place = next((place for place, _ in seen if place is not None), None)
    notes = next((notes for _, notes in seen if notes), [])
    staged = staging.last
    if staged is None:
        return CutFault(tuple(records), tuple(notes), None)
    by = f"stages: from {staged.partition_by} (slapo_partition)"
    lines = [*notes, f"{by}; what passes between them: from {staged.liveness_by} (slapo_liveness)"]
    last = len(staged.partition.stages) - 1
    at = list(range(last))
    if place is not None:
        index = _stage_of(staged, place.path)
        boundary = index if place.in_backward or index is None else index - 1
        at = [boundary] if boundary is not None and 0 <= boundary < last else at
        in_stage = "" if index is None else f" in stage {index}"
        lines.append(f"first seen at '{place.path}'{in_stage}: it {place.how}")
    elif kind is not None:
        lines.append(
            "every module has the same inputs and outputs as without the cuts: the difference arises between modules"
        )
    if place is not None and place.in_backward:
        lines += [line for number in at for line in _without_gradient(staged, number)]
    found = {record.index: record for number in at for record in _cuts(staged, number, records)}
    return CutFault(tuple(found[index] for index in sorted(found)), tuple(lines), staged.partition_by)


def _other_call(trials: ScheduleTrials, staging: Staging, reference: ReferenceRun, kind: str) -> OtherCall | None:
    assert staging.last is not None
    ends = [stage.last for stage in staging.last.partition.stages if stage.last is not None]
    looked_through = {".".join(end.split(".")[:depth]) for end in ends for depth in range(1, end.count(".") + 1)}
    phase = "evaluation" if KINDS[kind].phase == "evaluation" else "training"
    runs = []
    for each in (dataclasses.replace(trials, staging=None), trials):
        model = each.candidate.make(reference.conditions.dtype)
        runner = Runner(model, trials.inputs, each.conditions(each.candidate, reference, apart=True))
        if phase == "evaluation":
            runner.evaluate()
        runner.make_ready()  # before there are hooks, which a plugin may refuse to cut through
        with SeenCalls(runner.caller.modules, but=looked_through) as seen:
            runner.run((phase,))
        runs.append(seen)
    return first_other_call(*runs)


def _stage_of(staged: StagedModel, path: str) -> int | None:
    stages = staged.partition.stages
    return next(
        (each.index for each in stages if path in dict(each.module.named_modules(remove_duplicate=False))), None
    )


def _without_gradient(staged: StagedModel, boundary: int) -> list[str]:
    values = staged.partition.values
    names = [
        name
        for name in staged.liveness.sent(boundary)
        if values[name].dtype.is_floating_point and not values[name].requires_grad
    ]
    sent = ", ".join(f"'{name}'" for name in names)
    return [f"sent from stage {boundary} to stage {boundary + 1} without a gradient: {sent}"] if names else []


def _cuts(staged: StagedModel, boundary: int, records: Sequence[Record]) -> list[Record]:
    """List the steps that ask for a cut at or around its module."""
    end = staged.partition.stages[boundary].last or ""
    around = [record for record in records if f"{end}.".startswith(f"{record.path}." if record.path else "")]
    distribution = staged.partition_by.partition(" ")[0]
    theirs = [record for record in around if distribution == record.distribution]
    named = [record for record in around if record.name.startswith("pipeline.")]
    return theirs or named or [record for record in around if record.path == end]
