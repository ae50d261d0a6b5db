"""Sequence parallelism: which tensors between splits are slices of the sequence, and the steps that cut and gather.

A sum over the ranks is reduce-scattered, and each rank goes on with its slice of the sequence, as long as operators
work on each token by itself. It is gathered where a split begins, at whose input the gradient was summed before. A sum
stays all-reduced where that cannot be proved.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from slapo_models.auto.candidates import Candidate, Step
from slapo_models.auto.placement import Graph, argument_name
from slapo_models.auto.recording import PARAMETER, Operator, Value
from slapo_models.auto.slices import (
    NeedsFullError,
    NeedsSliceError,
    Region,
    SequencePlan,
    Tried,
    WrongPlaceError,
)

if TYPE_CHECKING:
    from slapo_models.auto.situations import Situation

_MOST_REPAIRS = 300


def plan_sequence(
    graph: Graph,
    splits: Sequence[Candidate],
    others: Sequence[Situation],
    heads: Sequence[str],
    ranks: int,
    before: SequencePlan | None = None,
) -> tuple[SequencePlan, list[Region]]:
    """Find the slices of the sequence between splits.

    Args:
        graph: the recording.
        splits: those that are applied.
        others: further situations.
        heads: paths of vocabularies' heads with shards.
        ranks: that share the sequence.
        before: a plan that a trial refuted.

    Returns:
        the collectives, and the slices in the recording and in each further situation.
    """
    plan = SequencePlan() if before is None else SequencePlan(full=before.full, refused=before.refused)
    for path, axis in _sums(graph, splits, ranks):
        if isinstance(axis, str):
            plan.kept[path] = axis
        else:
            plan.scattered[path] = axis
    tried = set(plan.refused)
    for _ in range(_MOST_REPAIRS):
        plan.parameters.clear()
        plan.streams.clear()
        gathered, number = dict(plan.gathered), len(plan.scattered)
        regions = [Region(graph, {each: each.leaves for each in splits}, plan, heads, ranks, training=True)]
        regions += [
            Region(other.graph, {each: other.leaves[each] for each in splits}, plan, heads, ranks, training=False)
            for other in others
        ]
        try:
            for region in regions:
                region.run()
        except NeedsSliceError as error:
            _enter(region, error, tried)
        except NeedsFullError as error:
            _gather(region, error, tried)
        except WrongPlaceError as error:
            _drop(plan, region, error, tried)
        else:
            if gathered == plan.gathered:
                return plan, regions
            continue
        plan.gathered.clear()
        plan.inside.clear()
        if len(plan.scattered) < number:
            tried = set(plan.refused)
    plan.keep_all("no arrangement of slices was found")
    return plan, []


def _enter(region: Region, error: NeedsSliceError, tried: set[Tried]) -> None:
    """Cut a full tensor where it enters the outermost module in which it can be a slice."""
    value, reason = error.value, str(error)
    if value.shape[error.axis] % region.ranks == 0 and value.origin != PARAMETER:
        for call in reversed(error.use.call.chain()):
            keys = [key for key, each in call.inputs.items() if each is value]
            place = (call.path, argument_name(call, keys[0])) if len(keys) == 1 else ("", 0)
            reason = region.plan.lost.get(place, reason)
            if len(keys) != 1 or "." in str(keys[0]) or ("entered", *place) in tried or value in call.outputs:
                continue
            if not region.has_split(call.path) or place in region.plan.gathered:
                continue
            tried.add(("entered", *place))
            region.plan.entered[place] = error.axis
            return
    _gather(region, NeedsFullError(error.other, error.use, reason), tried)


def _gather(region: Region, error: NeedsFullError, tried: set[Tried]) -> None:
    """Gather a slice behind the outermost module that returns it, or something that it was made from."""
    waiting: list[tuple[Value, Operator | None]] = [(error.value, error.use)]
    seen: set[Value] = {error.value}
    while waiting:
        value, use = waiting.pop(0)
        if value in region.natural:
            if _leave(region, value, use, tried):
                return
            assert value.made_by is not None
            for each in value.made_by.inputs:
                if each in region.axes and each not in seen:
                    seen.add(each)
                    waiting.append((each, value.made_by))
            continue
        for call in value.made_by.call.chain() if value in region.partial and value.made_by is not None else ():
            if value in call.outputs and call.path in region.plan.scattered:
                region.plan.keep(call.path, error.reason)
                return
        for place in list(region.plan.entered):
            if any(value in call.inputs.values() for call in region.graph.calls_of.get(place[0], ())):
                del region.plan.entered[place]
                region.plan.lost[place] = error.reason
                return
    region.plan.keep_all(error.reason)


def _leave(region: Region, value: Value, use: Operator | None, tried: set[Tried]) -> bool:
    assert value.made_by is not None
    axis = region.axis_of(value)
    for call in reversed(value.made_by.call.chain()):
        if value not in call.outputs or axis is None or (use is not None and use.call.is_within(call)):
            continue
        place = (call.path, call.outputs.index(value))
        if ("left", *place) in tried or call.path in region.summed or not region.has_split(call.path):
            continue
        if place[1] or (not call.path and len(call.outputs) > 1):  # which outputs follow depends on the call
            continue
        tried.add(("left", *place))
        region.plan.left[place] = axis
        return True
    return False


def _drop(plan: SequencePlan, region: Region, error: WrongPlaceError, tried: set[Tried]) -> None:
    """Take a collective back that does not fit, or what made the slice there."""
    kind, path, name = error.key
    place = (path, name)
    if kind == "entered":
        plan.entered.pop(place, None)
    elif kind == "left":
        plan.left.pop(place, None)  # type: ignore[arg-type]
    else:
        plan.keep_all(str(error))


def _sums(graph: Graph, splits: Iterable[Candidate], ranks: int) -> Iterator[tuple[str, int | str]]:
    """Yield the path of each sum with the axis of the sequence, or why it stays all-reduced."""
    for split in splits:
        for path, positions in split.placement.sums.items():
            found: set[int | str] = set()
            for call in graph.calls_of[path]:
                floating = [value for value in call.outputs if value.dtype.is_floating_point]
                for value in [call.outputs[each] for each in positions] if positions else floating[:1]:
                    found.add(_sequence_axis(value, ranks))
            yield path, found.pop() if len(found) == 1 else "calls with different axes"


def _sequence_axis(value: Value, ranks: int) -> int | str:
    """Return the axis along which a value is scattered: one along which the model combines tokens."""
    middle = [*range(1, len(value.shape) - 1)]
    mixed = [axis for axis in (*middle, 0) if len(value.shape) > 1 and value.axes[axis].found().reasons]
    axis = next(iter(mixed or middle), None)
    if axis is None:
        return "its result has no axis of a sequence"
    if value.shape[axis] % ranks or not value.shape[axis]:
        return f"{value.shape[axis]} elements of the sequence are not divisible by {ranks}"
    return axis


def with_sequence(plan: SequencePlan, steps: Iterable[Step], graph: Graph) -> list[Step]:
    """Return the steps of splits with reduce-scatters and gathers for all-reduces, and those for slices."""
    found: list[Step] = []
    gathered: dict[str, None] = {}
    for step in steps:
        if step.arguments == ("fwd_post", "all_reduce") and step.path in plan.scattered:
            options = (("axis", plan.scattered[step.path]), *step.options)
            reason = "its output is a partial sum, of which each rank keeps a slice of the sequence"
            found.append(Step(step.path, "sync", ("fwd_post", "reduce_scatter"), options, reason))
        elif step.arguments == ("bwd_post", "all_reduce"):
            found += _at_input(plan, step, graph, gathered)
        else:
            found.append(step)
    for (path, name), axis in plan.entered.items():
        options = (("axis", axis), *_inputs(graph, path, (name,)))
        found.append(Step(path, "sync", ("fwd_pre", "split"), options, "the sequence is cut from here on"))
    for (path, position), axis in plan.left.items():
        floating = sum(value.dtype.is_floating_point for value in graph.calls_of[path][0].outputs)
        options = (("axis", axis), *((("outputs", (position,)),) if floating > 1 else ()))
        found.append(
            Step(path, "sync", ("fwd_post", "all_gather"), options, "the sequence is needed in full behind it")
        )
    summed: dict[str, list[str]] = {}
    for path, name in plan.parameters:
        summed.setdefault(path, []).append(name)
    for path, names in summed.items():
        given = names[0] if len(names) == 1 else tuple(sorted(names, reverse=True))
        found.append(Step(path, "sync_gradient", (given,), (), "it is on every rank and sees a slice of the sequence"))
    forked = {step.path for step in found if step.name == "fork_rng"}
    for path in (path for path in plan.streams if path not in forked):
        found.append(Step(path, "fork_rng", (), (), "it uses the RNG on a slice of the sequence"))
    return found


def _at_input(plan: SequencePlan, step: Step, graph: Graph, gathered: dict[str, None]) -> Iterator[Step]:
    """Yield the gathers at a split's inputs, and the sums of gradients of its other inputs."""
    given = dict(step.options).get("inputs")
    if given is None:
        inputs = [(call, key) for call in graph.calls_of[step.path] for key, value in call.inputs.items()
                  if value.needs_gradient]  # fmt: skip
        given = tuple(dict.fromkeys(argument_name(call, key) for call, key in inputs))
    own = [(step.path, name) for name in given]
    for path in dict.fromkeys(
        plan.inside.get(place, place)[0] for place in own if place in {*plan.inside, *plan.gathered}
    ):
        if path not in gathered:
            gathered[path] = None
            names = tuple(name for other, name in plan.gathered if other == path)
            options = (("axis", plan.gathered[path, names[0]]), *_inputs(graph, path, names))
            reason = "the sequence is gathered for its shards, which see a part of the gradient"
            yield Step(path, "sync", ("fwd_pre", "all_gather"), options, reason)
    rest = tuple(name for path, name in own if (path, name) not in {*plan.inside, *plan.gathered})
    if rest:
        yield (
            step
            if len(rest) == len(own)
            else Step(step.path, step.name, step.arguments, (("inputs", rest),), step.reason)
        )


def _inputs(graph: Graph, path: str, names: tuple[int | str, ...]) -> tuple[tuple[str, tuple[int | str, ...]], ...]:
    """Return ``inputs`` of ``sync``, where a module may have others."""
    forward = type(graph.calls_of[path][0].module).forward
    return () if len(inspect.signature(forward).parameters) == 2 else (("inputs", names),)
