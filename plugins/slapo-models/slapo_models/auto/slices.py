"""Slices of the sequence between splits, followed through a recording, as a plan of collectives makes them.

A value is full on every rank, a slice, or a partial sum; hooks of modules turn one into another. Operators run on
slices as long as they work on each token by itself, which the rules of axes say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slapo_models.auto.axes import LEAF, Axis
from slapo_models.auto.candidates import Candidate, all_divisors, local_shape
from slapo_models.auto.operators import apply_rule
from slapo_models.auto.placement import Follow, Graph, argument_name
from slapo_models.auto.private import tree_map_only
from slapo_models.auto.recording import PARAMETER, Call, Operator, Value

FULL, SLICE, PARTIAL = "full", "slice", "partial"
Place = tuple[str, int | str]  # the path of a module, and an argument or the position of an output
Tried = tuple[str, str, int | str]
_INDEXING = frozenset(("aten::alias", "aten::slice"))
"""Operators of an index, which may take other elements of the next batch."""


class NeedsFullError(Exception):
    """An operator needs the sequence in full.

    Args:
        value: of which it has a slice.
        use: the operator; None: the model returns it.
        reason: why.
    """

    def __init__(self, value: Value, use: Operator | None, reason: str) -> None:
        super().__init__(reason)
        self.value, self.use, self.reason = value, use, reason


class NeedsSliceError(Exception):
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


class WrongPlaceError(Exception):
    """A collective meets a tensor that it is not for."""

    def __init__(self, key: Tried, value: Value) -> None:
        super().__init__(f"another call of '{key[1]}' would need another collective")
        self.key, self.value = key, value


@dataclass
class SequencePlan:
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
        """Leave a module's sums, and its likes' in repeated blocks, all-reduced; begin again."""
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
        self, graph: Graph, splits: Mapping[Candidate, tuple[Axis, ...]], plan: SequencePlan, heads: Sequence[str],
        ranks: int, *, training: bool,
    ) -> None:  # fmt: skip
        self.graph, self.plan, self.ranks, self._training = graph, plan, ranks, training
        self._by = all_divisors(splits.values(), ranks)
        self._leaves = frozenset(self._by)
        self.partial: set[Value] = set()
        self._passed_on: set[Value] = set()
        self.summed: dict[str, tuple[int, ...]] = {}
        self._sinks: dict[str, list[tuple[int | str, ...] | None]] = {path: [None] for path in heads}
        for leaves in splits.values():
            placement = Follow(graph, leaves).run()
            self.partial |= placement.partial
            self._passed_on |= placement.passed_on
            self.summed.update(placement.sums)
            for path, names in placement.gradients.items():
                self._sinks.setdefault(path, []).append(names)
        self.axes: dict[Value, list[Axis]] = {}
        self._cuts: list[Axis] = []
        self.natural: dict[Value, str] = {}
        self._seeing_slices: dict[Value, tuple[Value, Operator]] = {}  # full tensors with partial gradients

    # -- states of values ------------------------------------------------------------------------------------------

    def state(self, value: Value, call: Call | None) -> str:
        """Return what a rank has of a value in a call: all of it, a slice, or a partial sum; None: outside of all."""
        around = list(reversed(call.chain())) if call is not None else []
        state = self.natural.get(value, PARTIAL if value in self.partial else FULL)
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
                raise NeedsFullError(value, None, f"it leaves {type(call.module).__name__} beside the output")
            return state
        key = (call.path, call.outputs.index(value))
        if state == PARTIAL and call.path in self.summed:
            state = SLICE if call.path in self.plan.scattered else FULL
            if state == SLICE and value not in self.axes:
                self._cut(value, self.plan.scattered[call.path])
        elif key in self.plan.left:
            if state != SLICE or self.axis_of(value) != self.plan.left[key]:
                raise WrongPlaceError(("left", *key), value)
            state = FULL
        return state

    def _entering(self, state: str, value: Value, call: Call) -> str:
        keys = [key for key, each in call.inputs.items() if each is value]
        places = dict.fromkeys((call.path, argument_name(call, key)) for key in keys)  # in the order of every process
        entered = [place for place in places if place in self.plan.entered]
        gathered = [place for place in places if place in self.plan.gathered]
        if state == SLICE and not gathered and self._training and value not in call.outputs:
            sinks = self._sinks_in(value, call)
            if sinks:
                axis = self.axis_of(value)
                if axis is None or any("." in str(key) for key in keys):
                    reason = f"the input of {type(call.module).__name__} has tokens and samples on one axis"
                    raise NeedsFullError(value, None, reason)
                self.plan.gathered.update(dict.fromkeys(places, axis))
                self.plan.inside.update(dict.fromkeys(sinks - places.keys(), next(iter(places))))
                gathered = list(places)
        if not entered and not gathered:
            return state
        place = (entered or gathered)[0]
        kind, table = ("entered", self.plan.entered) if entered else ("gathered", self.plan.gathered)
        if value in call.outputs or len(entered or gathered) != len(places) or state != (FULL if entered else SLICE):
            raise WrongPlaceError((kind, *place), value)
        if entered and value not in self.axes:
            self._cut(value, table[place])  # type: ignore[index]
        if self.axis_of(value) != table[place]:  # type: ignore[index]
            raise WrongPlaceError((kind, *place), value)
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
        self.axes[value] = axes

    def _has_cut(self, axis: Axis) -> bool:
        cuts = {each.found() for each in self._cuts}
        return any(leaf in cuts for leaf in axis.leaves())

    def axis_of(self, value: Value) -> int | None:
        """Return the axis along which a value's slices lie one after the other."""
        cuts = {each.found() for each in self._cuts}
        for position, axis in enumerate(self.axes[value]):
            if self._has_cut(axis):
                return position if axis.factors()[0].found() in cuts else None
        return None

    def shape(self, value: Value, call: Call | None) -> tuple[int, ...]:
        """Return the shape of a rank's part of a result of an operator, or of an output behind a call."""
        state = self.natural.get(value, FULL)
        if call is not None and value.made_by is not None and value.made_by.call.is_within(call):
            made: Call | None = value.made_by.call
            state = self.natural.get(value, PARTIAL if value in self.partial else FULL)
            while made is not None and made is not call.around:
                state = self.leaving(state, value, made)
                made = made.around
        elif call is not None:
            state = self.state(value, call)
        if state != SLICE:
            return local_shape(value, self._by)
        cuts = {each.found(): self.ranks for each in self._cuts}
        return local_shape(Value(value.shape, value.dtype, axes=self.axes[value]), cuts)

    # -- operators -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Follow the slices through the recording.

        Raises:
            NeedsFullError, NeedsSliceError, WrongPlaceError: the plan is not right.
        """
        for operator in self.graph.recording.operators:
            states = {value: self.state(value, operator.call) for value in dict.fromkeys(operator.inputs)}
            slices = [value for value, state in states.items() if state == SLICE]
            if slices:
                self._cuts = list({each.found(): None for each in self._cuts})
                self._run(operator, slices, states)
        for value in self.graph.recording.outputs:
            if self.state(value, None) == SLICE:
                raise NeedsFullError(value, None, "the model returns it")
        self._check_calls()
        self._check_gradients()
        self._check_streams()

    def _run(self, operator: Operator, slices: list[Value], states: Mapping[Value, str]) -> None:
        def refuse(reason: str) -> NeedsFullError:
            return NeedsFullError(slices[0], operator, reason)

        for value in (*states, *operator.results):
            if not self._leaves.isdisjoint(self.graph.leaves(value)) or states.get(value) == PARTIAL:
                raise refuse(f"{operator.where} combines it with shards")
            if value in self.partial and value not in states:
                raise refuse(f"{operator.where} makes a partial sum of it")
            if value.changed_gradient or (value in self._passed_on and states.get(value, SLICE) == SLICE):
                raise refuse(value.changed_gradient or f"{operator.where} has a partial gradient")
        if self.plan.full and place_of(operator) in self.plan.full:
            raise refuse(self.plan.full[place_of(operator)])
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
                raise NeedsSliceError(value, position, operator, slices[0])
            if state == FULL and value.needs_gradient and any(each.needs_gradient for each in operator.results):
                self._sum_gradient(operator, value, slices[0])
        for value, result in zip(operator.results, results, strict=True):
            if sum(self._has_cut(axis) for axis in result.axes) != 1:
                raise refuse(f"{operator.where} gives a result without the sequence")
            self.natural[value], self.axes[value] = SLICE, result.axes
        if operator.is_random:
            self.plan.streams[operator.call.path] = None

    def _local(self, value: Value, state: str) -> Value:
        axes = self.axes[value] if state == SLICE else [Axis(size) for size in value.shape]
        return Value(value.shape, value.dtype, value.origin, axes=list(axes), numbers=value.numbers)

    def _indexes(self, operator: Operator, local: Mapping[Value, Value]) -> bool:
        source = local[operator.arguments["self"]]
        return operator.name == "aten::alias" or self._has_cut(source.axes[operator.arguments.get("dim", 0)])

    def _sum_gradient(self, operator: Operator, value: Value, other: Value) -> None:
        """Sum the gradient of a full tensor that sees slices, at the parameters it is made from in the same module."""
        if value.origin == PARAMETER:
            own = next((name for path, name in value.names if path == operator.call.path), None)
            if own is None:
                raise NeedsFullError(other, operator, f"{operator.where} reads a parameter of another module")
            self.plan.parameters[(operator.call.path, own)] = None
            return
        if value.made_by is None or value.made_by.call is not operator.call or value.changed_gradient:
            reason = f"the gradient of a tensor without the sequence is partial in {operator.where}"
            raise NeedsFullError(other, operator, reason)
        if value not in self._seeing_slices:
            self._seeing_slices[value] = (other, operator)
            for each in value.made_by.inputs:
                if each.needs_gradient:
                    self._sum_gradient(value.made_by, each, other)

    def _check_calls(self) -> None:
        """Require that the collectives of a module fit each of its calls."""
        for (path, name), _ in (*self.plan.entered.items(), *self.plan.gathered.items()):
            for call in self.graph.calls_of.get(path, ()):
                if not any(argument_name(call, key) == name for key in call.inputs):
                    kind = "entered" if (path, name) in self.plan.entered else "gathered"
                    raise WrongPlaceError((kind, path, name), next(iter(call.inputs.values())))
                for key, value in call.inputs.items():
                    if argument_name(call, key) == name:
                        self.state(value, call)
        for (path, name), around in self.plan.inside.items() if self._training else ():
            for call in self.graph.calls_of[path]:
                given = [value for key, value in call.inputs.items() if argument_name(call, key) == name]
                outer = next((each for each in call.chain() if each.path == around[0]), call)
                own = [value for key, value in outer.inputs.items() if argument_name(outer, key) == around[1]]
                if not given or given != own:
                    raise WrongPlaceError(("inside", path, name), call.outputs[0])
        for path, position in self.plan.left:
            for call in self.graph.calls_of.get(path, ()):
                left = call.outputs[position] if position < len(call.outputs) else None
                if left is None or left.made_by is None or not left.made_by.call.is_within(call):
                    raise WrongPlaceError(("left", path, position), call.outputs[0])
                self.shape(left, call)

    def _check_gradients(self) -> None:
        """Require that what sees slices sees nothing else: its gradient would be partial and complete."""
        for value, (other, operator) in self._seeing_slices.items():
            if not all(self._sees_slices(use) for use in value.uses):
                raise NeedsFullError(other, operator, f"a gradient is complete and partial in {operator.where}")
        for path, name in self.plan.parameters:
            value = self.graph.recording.values[f"{path}.{name}".lstrip(".")]
            if not all(self._sees_slices(use) for use in value.uses if use.call.path == path):
                raise WrongPlaceError(("parameters", path, name), value)

    def _sees_slices(self, use: Operator) -> bool:
        flowing = [value for value in use.results if value.needs_gradient]
        return all(self.natural.get(value) == SLICE or value in self._seeing_slices for value in flowing)

    def _check_streams(self) -> None:
        """Leave out streams of modules that use the RNG on full tensors besides."""
        for operator in self.graph.random:
            values = (*operator.inputs, *operator.results)
            is_sharded = any(not self._leaves.isdisjoint(self.graph.leaves(value)) for value in values)
            if not is_sharded and not self.makes_slices(operator):
                for call in operator.call.chain():
                    self.plan.streams.pop(call.path, None)

    def makes_slices(self, operator: Operator) -> bool:
        """Return whether an operator runs on slices."""
        return any(self.natural.get(value) == SLICE for value in operator.results)

    def has_split(self, path: str) -> bool:
        prefix = f"{path}." if path else ""
        return any(
            other == path or other.startswith(prefix)
            for value in dict.fromkeys(self.graph.recording.values.values())
            if not self._leaves.isdisjoint(self.graph.leaves(value))
            for other, _ in value.names
        )
