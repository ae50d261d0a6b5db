"""Sequence parallelism: which tensors between splits are slices of the sequence, and the steps that cut and gather.

A sum over the ranks is reduce-scattered, and each rank goes on with its slice of the sequence, as long as operators
work on each token by itself. It is gathered where a split begins, at whose input the gradient was summed before. A sum
stays all-reduced where that cannot be proved.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slapo_models.auto.axes import LEAF, Axis
from slapo_models.auto.candidates import Candidate, Step, all_divisors, local_shape
from slapo_models.auto.operators import apply_rule
from slapo_models.auto.placement import Follow, Graph, argument_name
from slapo_models.auto.private import tree_map_only
from slapo_models.auto.recording import PARAMETER, Call, Operator, Value

if TYPE_CHECKING:
    from slapo_models.auto.situations import Situation

FULL, SLICE, PARTIAL = "full", "slice", "partial"
Place = tuple[str, int | str]  # the path of a module, and an argument or the position of an output
Tried = tuple[str, str, int | str]
_MOST_REPAIRS = 300
_INDEXING = frozenset(("aten::alias", "aten::slice", "aten::narrow"))
"""Operators of an index, which may take other elements of the next batch."""


class _NeedsFullError(Exception):
    """An operator needs the sequence in full.

    Args:
        value: of which it has a slice.
        use: the operator; None: the model returns it.
        reason: why.
    """

    def __init__(self, value: Value, use: Operator | None, reason: str) -> None:
        super().__init__(reason)
        self.value, self.use, self.reason = value, use, reason


class _NeedsSliceError(Exception):
    """An operator combines a full tensor with a slice.

    Args:
        value: the full tensor.
        axis: of it, with the sequence.
        use: the operator.
        other: the slice.
    """

    def __init__(self, value: Value, axis: int, use: Operator, other: Value) -> None:
        super().__init__(f"{use.where} combines it with a full tensor")
        self.value, self.axis, self.use, self.other = value, axis, use, other


class _WrongPlaceError(Exception):
    """A collective meets a tensor that it is not for."""

    def __init__(self, key: Tried, value: Value) -> None:
        super().__init__(f"another call of '{key[1]}' would need another collective")
        self.key, self.value = key, value


@dataclass
class Plan:
    """The collectives of sequence parallelism.

    Args:
        scattered: path of a module with a sum -> the axis to scatter.
        gathered: path and argument of a module with a split -> the axis to gather.
        inside: path and argument where the gradient was summed -> those around it where the sequence is gathered.
        entered: path and argument -> the axis of a full tensor of which each rank takes its slice.
        left: path and position of an output -> the axis to gather.
        parameters: unsharded parameters that see slices: path and name.
        streams: paths of modules that use the RNG on slices.
        kept: path of a sum that stays an all-reduce -> the reason.
        full: operators that a trial found to need the full sequence, by module and position -> the difference.
        refused: places where a trial found that the sequence cannot be cut.
        lost: places where it was cut before -> why it is not.
    """

    scattered: dict[str, int] = field(default_factory=dict)
    gathered: dict[Place, int] = field(default_factory=dict)
    inside: dict[Place, Place] = field(default_factory=dict)
    entered: dict[Place, int] = field(default_factory=dict)
    left: dict[tuple[str, int], int] = field(default_factory=dict)
    parameters: dict[tuple[str, str], None] = field(default_factory=dict)
    streams: dict[str, None] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    full: dict[tuple[str, int], str] = field(default_factory=dict)
    refused: set[Tried] = field(default_factory=set)
    lost: dict[Place, str] = field(default_factory=dict)

    def blame(self, operator: Operator | None, regions: Sequence[Region], difference: str) -> bool:
        """Find what a trial refutes; return whether another plan may be right.

        Args:
            operator: of the reference model, where the trial differs.
            regions: the slices that were tried.
            difference: the reason.
        """
        if operator is None:
            return False
        if any(region.makes_slices(operator) for region in regions):
            place = place_of(operator)
            is_new = place not in self.full
            self.full[place] = difference
            return is_new
        paths = {call.path for call in operator.call.chain()}  # sizes of a slice may be read there
        found: set[Tried] = {("entered", path, name) for path, name in self.entered if path in paths}
        self.refused |= found
        return bool(found)

    def keep(self, path: str, reason: str) -> None:
        """Leave the sums of a module, and of those of repeated blocks like it, all-reduced; begin again."""
        for other in [each for each in self.scattered if kind_of(each) == kind_of(path)]:
            del self.scattered[other]
            self.kept[other] = reason
        for places in (self.gathered, self.inside, self.entered, self.left):
            places.clear()  # type: ignore[attr-defined]

    def keep_all(self, reason: str) -> None:
        """Leave every sum all-reduced."""
        for path in list(self.scattered):
            self.keep(path, reason)


def kind_of(path: str) -> str:
    """Return a path without the numbers of repeated blocks."""
    return ".".join("*" if level.isdigit() else level for level in path.split("."))


def place_of(operator: Operator) -> tuple[str, int]:
    """Return an operator's module, without numbers of repeated blocks, and its position there."""
    return kind_of(operator.call.path), operator.call.operators.index(operator)


class Region:
    """The slices of one recording, as a plan makes them.

    Args:
        graph: the recording.
        splits: the leaves of each proved split in it.
        heads: paths of vocabularies' heads, at whose inputs gradients are summed.
        plan: the collectives; gathers are added to it in training.
        ranks: that share the sequence.
        training: whether gradients flow.
    """

    def __init__(
        self, graph: Graph, splits: Mapping[Candidate, tuple[Axis, ...]], plan: Plan, heads: Sequence[str], ranks: int,
        *, training: bool,
    ) -> None:  # fmt: skip
        self._graph, self._plan, self._ranks, self._training = graph, plan, ranks, training
        self._by = all_divisors(splits.values(), ranks)
        self._leaves = frozenset(self._by)
        self._partial: set[Value] = set()
        self._passed_on: set[Value] = set()
        self._summed: dict[str, tuple[int, ...]] = {}
        self._sinks: dict[str, list[tuple[int | str, ...] | None]] = {path: [None] for path in heads}
        for leaves in splits.values():
            placement = Follow(graph, leaves).run()
            self._partial |= placement.partial
            self._passed_on |= placement.passed_on
            self._summed.update(placement.sums)
            for path, names in placement.gradients.items():
                self._sinks.setdefault(path, []).append(names)
        self._axes: dict[Value, list[Axis]] = {}
        self._cuts: list[Axis] = []
        self._natural: dict[Value, str] = {}
        self._seeing_slices: dict[Value, tuple[Value, Operator]] = {}  # full tensors with partial gradients

    # -- states of values ------------------------------------------------------------------------------------------

    def state(self, value: Value, call: Call | None) -> str:
        """Return what a rank has of a value in a call: all of it, a slice, or a partial sum; None: outside of all."""
        around = list(reversed(call.chain())) if call is not None else []
        state = self._natural.get(value, PARTIAL if value in self._partial else FULL)
        made = value.made_by.call if value.made_by is not None else None
        while made is not None and made not in around:
            state = self.leaving(state, value, made)
            made = made.around
        inner = around[around.index(made) + 1 :] if made is not None else around
        for each in inner:
            state = self._entering(state, value, each)
        return state

    def leaving(self, state: str, value: Value, call: Call) -> str:
        """Return the state of a value behind a call that makes it."""
        if value not in call.outputs:
            if state == SLICE:
                raise _NeedsFullError(value, None, f"it leaves {type(call.module).__name__} beside the output")
            return state
        key = (call.path, call.outputs.index(value))
        if state == PARTIAL and call.path in self._summed:
            state = SLICE if call.path in self._plan.scattered else FULL
            if state == SLICE and value not in self._axes:
                self._cut(value, self._plan.scattered[call.path])
        elif key in self._plan.left:
            if state != SLICE or self._axis_of(value) != self._plan.left[key]:
                raise _WrongPlaceError(("left", *key), value)
            state = FULL
        return state

    def _entering(self, state: str, value: Value, call: Call) -> str:
        keys = [key for key, each in call.inputs.items() if each is value]
        names = {argument_name(call, key) for key in keys}
        places = {(call.path, name) for name in names}
        entered, gathered = places & self._plan.entered.keys(), places & self._plan.gathered.keys()
        if state == SLICE and not gathered and self._training and value not in call.outputs:
            sinks = self._sinks_in(value, call)
            if sinks:
                axis = self._axis_of(value)
                if axis is None or any("." in str(key) for key in keys):
                    raise _NeedsFullError(value, None, f"{type(call.module).__name__} cannot gather its input")
                self._plan.gathered.update(dict.fromkeys(places, axis))
                self._plan.inside.update(dict.fromkeys(sinks - places, next(iter(places))))
                gathered = places
        if not entered and not gathered:
            return state
        place = next(iter(entered or gathered))
        kind, table = ("entered", self._plan.entered) if entered else ("gathered", self._plan.gathered)
        if value in call.outputs or (entered or gathered) != places or state != (FULL if entered else SLICE):
            raise _WrongPlaceError((kind, *place), value)
        if entered and value not in self._axes:
            self._cut(value, table[place])  # type: ignore[index]
        if self._axis_of(value) != table[place]:  # type: ignore[index]
            raise _WrongPlaceError((kind, *place), value)
        return SLICE if entered else FULL

    def _sinks_in(self, value: Value, call: Call) -> set[Place]:
        """Return the arguments where the gradient of an input of a call is summed; none if not all of it is."""
        found: set[Place] = set()
        for use in value.uses:
            if use.call.is_within(call):
                inner = [each for each in use.call.chain() if each.is_within(call)]
                places = [
                    (each.path, argument_name(each, key)) for each in inner for key in self._summed_at(value, each)
                ]
                if not places:
                    return set()
                found.add(places[-1])
        return found

    def _summed_at(self, value: Value, call: Call) -> Iterator[int | str]:
        """Yield the arguments of a call that are a value whose gradient is summed there."""
        for key, each in call.inputs.items():
            if each is value and value.needs_gradient:
                names = self._sinks.get(call.path, ())
                if any(own is None or argument_name(call, key) in own for own in names):
                    yield key

    def _cut(self, value: Value, axis: int) -> None:
        axes = [Axis(size) for size in value.shape]
        self._cuts.append(axes[axis])
        self._axes[value] = axes

    def _has_cut(self, axis: Axis) -> bool:
        cuts = {each.found() for each in self._cuts}
        return any(leaf in cuts for leaf in axis.leaves())

    def _axis_of(self, value: Value) -> int | None:
        """Return the axis along which a value's slices lie one after the other."""
        cuts = {each.found() for each in self._cuts}
        for position, axis in enumerate(self._axes[value]):
            if self._has_cut(axis):
                return position if axis.factors()[0].found() in cuts else None
        return None

    def shape(self, value: Value, call: Call | None) -> tuple[int, ...]:
        """Return the shape of a rank's part of a result of an operator, or of an output behind a call."""
        state = self._natural.get(value, FULL)
        if call is not None and value.made_by is not None and value.made_by.call.is_within(call):
            made: Call | None = value.made_by.call
            state = self._natural.get(value, PARTIAL if value in self._partial else FULL)
            while made is not None and made is not call.around:
                state = self.leaving(state, value, made)
                made = made.around
        elif call is not None:
            state = self.state(value, call)
        if state != SLICE:
            return local_shape(value, self._by)
        cuts = {each.found(): self._ranks for each in self._cuts}
        return local_shape(Value(value.shape, value.dtype, axes=self._axes[value]), cuts)

    # -- operators -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Follow the slices through the recording.

        Raises:
            _NeedsFullError, _NeedsSliceError, _WrongPlaceError: the plan is not right.
        """
        for operator in self._graph.recording.operators:
            states = {value: self.state(value, operator.call) for value in dict.fromkeys(operator.inputs)}
            slices = [value for value, state in states.items() if state == SLICE]
            if slices:
                self._cuts = list({each.found(): None for each in self._cuts})
                self._run(operator, slices, states)
        for value in self._graph.recording.outputs:
            if self.state(value, None) == SLICE:
                raise _NeedsFullError(value, None, "the model returns it")
        self._check_calls()
        self._check_gradients()
        self._check_streams()

    def _run(self, operator: Operator, slices: list[Value], states: Mapping[Value, str]) -> None:
        def refuse(reason: str) -> _NeedsFullError:
            return _NeedsFullError(slices[0], operator, reason)

        for value in (*states, *operator.results):
            if not self._leaves.isdisjoint(self._graph.leaves(value)) or states.get(value) == PARTIAL:
                raise refuse(f"{operator.where} combines it with shards")
            if value in self._partial and value not in states:
                raise refuse(f"{operator.where} makes a partial sum of it")
            if value.changed_gradient or (value in self._passed_on and states.get(value, SLICE) == SLICE):
                raise refuse(value.changed_gradient or f"{operator.where} has a partial gradient")
        if self._plan.full and place_of(operator) in self._plan.full:
            raise refuse(self._plan.full[place_of(operator)])
        local = {value: self._local(value, states[value]) for value in states}
        arguments = tree_map_only(Value, lambda value: local[value], operator.arguments)
        results = [Value(value.shape, value.dtype) for value in operator.results]
        own = Operator(operator.name, operator.function, arguments, results, operator.call, operator.index)
        if operator.name in _INDEXING and self._indexes(operator, local):
            raise refuse(f"{operator.where} takes elements of the sequence")
        summed = apply_rule(own) or ()
        if any(each.found().kind != LEAF or each.found().reasons for each in self._cuts):
            raise refuse(f"{operator.where} needs the full sequence")
        if any(self._has_cut(axis) for axis in summed):
            raise refuse(f"{operator.where} sums over the sequence")
        for value, state in states.items():
            position = next((place for place, axis in enumerate(local[value].axes) if self._has_cut(axis)), None)
            if state == FULL and position is not None:
                raise _NeedsSliceError(value, position, operator, slices[0])
            if state == FULL and value.needs_gradient and any(each.needs_gradient for each in operator.results):
                self._sum_gradient(operator, value, slices[0])
        for value, result in zip(operator.results, results, strict=True):
            if sum(self._has_cut(axis) for axis in result.axes) != 1:
                raise refuse(f"{operator.where} gives a result without the sequence")
            self._natural[value], self._axes[value] = SLICE, result.axes
        if operator.is_random:
            self._plan.streams[operator.call.path] = None

    def _local(self, value: Value, state: str) -> Value:
        axes = self._axes[value] if state == SLICE else [Axis(size) for size in value.shape]
        return Value(value.shape, value.dtype, value.origin, axes=list(axes), numbers=value.numbers)

    def _indexes(self, operator: Operator, local: Mapping[Value, Value]) -> bool:
        source = local[operator.arguments["self"]]
        return operator.name == "aten::alias" or self._has_cut(source.axes[operator.arguments.get("dim", 0)])

    def _sum_gradient(self, operator: Operator, value: Value, other: Value) -> None:
        """Sum the gradient of a full tensor that sees slices, at the parameters it is made from in the same module."""
        if value.origin == PARAMETER:
            own = next((name for path, name in value.names if path == operator.call.path), None)
            if own is None:
                raise _NeedsFullError(other, operator, f"{operator.where} reads a parameter of another module")
            self._plan.parameters[(operator.call.path, own)] = None
            return
        if value.made_by is None or value.made_by.call is not operator.call or value.changed_gradient:
            reason = f"the gradient of a tensor without the sequence is partial in {operator.where}"
            raise _NeedsFullError(other, operator, reason)
        if value not in self._seeing_slices:
            self._seeing_slices[value] = (other, operator)
            for each in value.made_by.inputs:
                if each.needs_gradient:
                    self._sum_gradient(value.made_by, each, other)

    def _check_calls(self) -> None:
        """Require that the collectives of a module fit each of its calls."""
        for (path, name), _ in (*self._plan.entered.items(), *self._plan.gathered.items()):
            for call in self._graph.calls_of.get(path, ()):
                if not any(argument_name(call, key) == name for key in call.inputs):
                    kind = "entered" if (path, name) in self._plan.entered else "gathered"
                    raise _WrongPlaceError((kind, path, name), next(iter(call.inputs.values())))
                for key, value in call.inputs.items():
                    if argument_name(call, key) == name:
                        self.state(value, call)
        for (path, name), around in self._plan.inside.items() if self._training else ():
            for call in self._graph.calls_of[path]:
                given = [value for key, value in call.inputs.items() if argument_name(call, key) == name]
                outer = next((each for each in call.chain() if each.path == around[0]), call)
                own = [value for key, value in outer.inputs.items() if argument_name(outer, key) == around[1]]
                if not given or given != own:
                    raise _WrongPlaceError(("inside", path, name), call.outputs[0])
        for path, position in self._plan.left:
            for call in self._graph.calls_of.get(path, ()):
                output = call.outputs[position] if position < len(call.outputs) else None
                if output is None or output.made_by is None or not output.made_by.call.is_within(call):
                    raise _WrongPlaceError(("left", path, position), call.outputs[0])
                self.shape(output, call)

    def _check_gradients(self) -> None:
        """Require that what sees slices sees nothing else: its gradient would be partial and complete."""
        for value, (other, operator) in self._seeing_slices.items():
            if not all(self._sees_slices(use) for use in value.uses):
                raise _NeedsFullError(other, operator, f"a gradient is complete and partial in {operator.where}")
        for path, name in self._plan.parameters:
            value = self._graph.recording.values[f"{path}.{name}".lstrip(".")]
            if not all(self._sees_slices(use) for use in value.uses if use.call.path == path):
                raise _WrongPlaceError(("parameters", path, name), value)

    def _sees_slices(self, use: Operator) -> bool:
        flowing = [value for value in use.results if value.needs_gradient]
        return all(self._natural.get(value) == SLICE or value in self._seeing_slices for value in flowing)

    def _check_streams(self) -> None:
        """Leave out streams of modules that use the RNG on full tensors besides."""
        for operator in self._graph.random:
            values = (*operator.inputs, *operator.results)
            is_sharded = any(not self._leaves.isdisjoint(self._graph.leaves(value)) for value in values)
            if not is_sharded and not self.makes_slices(operator):
                for call in operator.call.chain():
                    self._plan.streams.pop(call.path, None)

    # -- repairs ---------------------------------------------------------------------------------------------------

    def enter(self, error: _NeedsSliceError, tried: set[Tried]) -> None:
        """Cut a full tensor where it enters the outermost module in which it can be a slice."""
        value, reason = error.value, str(error)
        if value.shape[error.axis] % self._ranks == 0 and value.origin != PARAMETER:
            for call in reversed(error.use.call.chain()):
                keys = [key for key, each in call.inputs.items() if each is value]
                place = (call.path, argument_name(call, keys[0])) if len(keys) == 1 else ("", 0)
                reason = self._plan.lost.get(place, reason)
                if len(keys) != 1 or "." in str(keys[0]) or ("entered", *place) in tried or value in call.outputs:
                    continue
                if not self._has_split(call.path) or place in self._plan.gathered:
                    continue
                tried.add(("entered", *place))
                self._plan.entered[place] = error.axis
                return
        self.gather(_NeedsFullError(error.other, error.use, reason), tried)

    def gather(self, error: _NeedsFullError, tried: set[Tried]) -> None:
        """Gather a slice behind the outermost module that returns it, or something that it was made from."""
        waiting: list[tuple[Value, Operator | None]] = [(error.value, error.use)]
        seen: set[Value] = {error.value}
        while waiting:
            value, use = waiting.pop(0)
            if value in self._natural:
                if self._leave(value, use, tried):
                    return
                assert value.made_by is not None
                for each in value.made_by.inputs:
                    if each in self._axes and each not in seen:
                        seen.add(each)
                        waiting.append((each, value.made_by))
                continue
            for call in value.made_by.call.chain() if value in self._partial and value.made_by is not None else ():
                if value in call.outputs and call.path in self._plan.scattered:
                    self._plan.keep(call.path, error.reason)
                    return
            for place in list(self._plan.entered):
                if any(value in call.inputs.values() for call in self._graph.calls_of.get(place[0], ())):
                    del self._plan.entered[place]
                    self._plan.lost[place] = error.reason
                    return
        self._plan.keep_all(error.reason)

    def _leave(self, value: Value, use: Operator | None, tried: set[Tried]) -> bool:
        assert value.made_by is not None
        axis = self._axis_of(value)
        for call in reversed(value.made_by.call.chain()):
            if value not in call.outputs or axis is None or (use is not None and use.call.is_within(call)):
                continue
            place = (call.path, call.outputs.index(value))
            if ("left", *place) in tried or call.path in self._summed or not self._has_split(call.path):
                continue
            if place[1] or (not call.path and len(call.outputs) > 1):  # which outputs follow depends on the call
                continue
            tried.add(("left", *place))
            self._plan.left[place] = axis
            return True
        return False

    def makes_slices(self, operator: Operator) -> bool:
        """Return whether an operator runs on slices."""
        return any(self._natural.get(value) == SLICE for value in operator.results)

    def _has_split(self, path: str) -> bool:
        prefix = f"{path}." if path else ""
        return any(
            other == path or other.startswith(prefix)
            for value in dict.fromkeys(self._graph.recording.values.values())
            if not self._leaves.isdisjoint(self._graph.leaves(value))
            for other, _ in value.names
        )


def plan_sequence(
    graph: Graph,
    splits: Sequence[Candidate],
    others: Sequence[Situation],
    heads: Sequence[str],
    ranks: int,
    before: Plan | None = None,
) -> tuple[Plan, list[Region]]:
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
    plan = Plan() if before is None else Plan(full=before.full, refused=before.refused)
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
        except _NeedsSliceError as error:
            region.enter(error, tried)
        except _NeedsFullError as error:
            region.gather(error, tried)
        except _WrongPlaceError as error:
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


def _drop(plan: Plan, region: Region, error: _WrongPlaceError, tried: set[Tried]) -> None:
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


def with_sequence(plan: Plan, steps: Iterable[Step], graph: Graph) -> list[Step]:
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
    for path in plan.streams.keys() - forked:
        found.append(Step(path, "fork_rng", (), (), "it uses the RNG on a slice of the sequence"))
    return found


def _at_input(plan: Plan, step: Step, graph: Graph, gathered: dict[str, None]) -> Iterator[Step]:
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
