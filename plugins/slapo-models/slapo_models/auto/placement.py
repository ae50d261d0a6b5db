"""Follow a split through a recording: partial results, gradients that are partial, and the collectives for both."""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from slapo_models.auto.axes import Axis, coverage
from slapo_models.auto.recording import BUFFER, INPUT, PARAMETER, Call, Operator, Recording, Value


class _ConflictError(Exception):
    """A gradient that is complete in some uses and partial in others.

    Args:
        complete: the uses where it is complete.
        what: the reason.
    """

    def __init__(self, complete: list[Operator], what: str) -> None:
        super().__init__(what)
        self.complete = complete


class LeftWhole(Exception):  # noqa: N818 - an answer, not an error
    """Why something is not split."""


@dataclass
class Placement:
    """The collectives of a split.

    Args:
        sums: path -> positions of the outputs that are partial.
        gradients: path -> arguments whose gradients are partial.
        parameters: unsharded parameters whose gradients are partial: path and name.
        streams: paths of modules that use the RNG on shards.
        regions: paths of modules that run an operator on a shard.
        biases: paths of modules whose forward must leave their bias out, which is added to the reduced sum.
        partial: values that are partial, or were reduced.
        passed_on: full values whose gradients stay partial.
    """

    sums: dict[str, tuple[int, ...]] = field(default_factory=dict)
    gradients: dict[str, tuple[int | str, ...] | None] = field(default_factory=dict)
    parameters: dict[tuple[str, str], None] = field(default_factory=dict)
    streams: dict[str, None] = field(default_factory=dict)
    regions: dict[str, None] = field(default_factory=dict)
    biases: dict[str, None] = field(default_factory=dict)
    partial: set[Value] = field(default_factory=set)
    passed_on: set[Value] = field(default_factory=set)


class Graph:
    """A recording with its axes, by leaf.

    Args:
        recording: of the model.
        contractions: operator's index -> axes that it sums over.
    """

    def __init__(self, recording: Recording, contractions: dict[int, list[Axis]]) -> None:
        self.recording = recording
        self.contractions = contractions
        self._leaves: dict[Value, frozenset[Axis]] = {}
        self.operators_of: dict[Axis, list[Operator]] = {}
        self.calls_of: dict[str, list[Call]] = {}
        self.outputs = set(recording.outputs)
        self.random = [operator for operator in recording.operators if operator.is_random]
        for call in recording.calls:
            self.calls_of.setdefault(call.path, []).append(call)
        for operator in recording.operators:
            touched: set[Axis] = set()
            for value in (*operator.inputs, *operator.results):
                touched |= self.leaves(value)
            for leaf in touched:
                self.operators_of.setdefault(leaf, []).append(operator)

    def leaves(self, value: Value) -> frozenset[Axis]:
        """Return the leaves of a value's axes."""
        if value not in self._leaves:
            self._leaves[value] = frozenset(leaf for axis in value.axes for leaf in axis.leaves())
        return self._leaves[value]


_LINEAR = frozenset(
    f"aten::{name}"
    for name in (
        "view", "_unsafe_view", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "clone", "_to_copy",
        "alias", "slice", "select", "split", "split_with_sizes", "unbind", "sum", "mean", "neg", "index",
        "index_select", "view_copy", "gather", "constant_pad_nd", "repeat",
    )
)  # fmt: skip
COPIES = frozenset(("aten::clone", "aten::alias", "aten::detach", "aten::_to_copy", "slapo::overwritten"))
"""Whether memory is copied depends on sizes."""
_FAR = 5000
_SCALED = frozenset(f"aten::{name}" for name in ("mul", "mul_", "div", "div_"))
_ADDED = frozenset(f"aten::{name}" for name in ("add", "add_", "sub", "cat", "stack"))
_INTO_ZEROS = frozenset(f"aten::{name}" for name in ("index_add", "index_add_", "index_put", "index_put_", "copy_",
                                                     "scatter_add", "scatter_add_"))  # fmt: skip
_SAME = frozenset(f"aten::{name}" for name in ("detach", "alias", "clone", "view", "_to_copy", "expand", "slice"))
_MADE_NEW = frozenset(f"aten::{name}" for name in ("new_empty", "new_zeros", "new_ones", "new_full", "empty_like"))
_SEGMENTS = frozenset(f"aten::{name}" for name in ("slice", "split", "split_with_sizes", "index"))
_ZEROS = frozenset(f"aten::{name}" for name in ("zeros", "zeros_like", "new_zeros"))


class Follow:
    """Follow a split of some leaves.

    Args:
        graph: of the model.
        leaves: that are split: one, or two, where tensors with the first alone are shards that several ranks have.
    """

    def __init__(self, graph: Graph, leaves: Sequence[Axis]) -> None:
        self._graph = graph
        self._leaves = tuple(leaves)
        self._split = frozenset(self._leaves)
        self._coverage: dict[Value, frozenset[frozenset[Axis]]] = {}
        self._partial: set[Value] = set()
        self._reduced: dict[Value, Call] = {}
        self._partial_uses: dict[Value, list[Operator]] = {}
        self._left_out: set[tuple[Operator, Value]] = set()
        self._segments: list[Value] = []  # full segments of concatenations whose other segments are split
        self._passed_on: set[Value] = set()  # whose gradients stay partial
        self._placed: dict[str, set[tuple[int, int | str]]] = {}
        self._complete_from: dict[Value, list[Call]] = {}
        self._forbidden: set[str] = set()
        self._paths = {
            path
            for value in graph.recording.values.values()
            if not self._split.isdisjoint(graph.leaves(value))
            for path, _ in value.names
        }
        self.placement = Placement()

    def run(self) -> Placement:
        """Return the collectives.

        Raises:
            LeftWhole: the split cannot be proved right.
        """
        self._forward()
        entries = {value: list(uses) for value, uses in self._partial_uses.items()}
        while True:
            try:
                self._backward()
            except _ConflictError as conflict:
                behind = self._reductions_behind(conflict.complete) - self._forbidden
                if not behind:
                    raise LeftWhole(str(conflict)) from None
                self._forbidden |= behind  # the gradient stays partial there, and becomes complete further up
                self._partial_uses = {value: list(uses) for value, uses in entries.items()}
                self.placement.parameters.clear()
                continue
            break
        for path, places in self._placed.items():
            self._check_calls(path, places)
        self._check_streams()
        self.placement.partial, self.placement.passed_on = self._partial, self._passed_on
        return self.placement

    def _reductions_behind(self, operators: list[Operator]) -> set[str]:
        """Return the paths of modules at whose inputs gradients become complete, that operators' results lead to."""
        found: set[str] = set()
        waiting, seen = list(operators), set(operators)
        while waiting and len(seen) < _FAR:
            for value in waiting.pop().results:
                calls = self._complete_from.get(value, ())
                found.update(call.path for call in calls)
                for use in value.uses:
                    if use not in seen and not any(use.call.is_within(call) for call in calls):
                        seen.add(use)
                        waiting.append(use)
        return found

    def is_split(self, value: Value) -> bool:
        """Return whether an axis of the value is split."""
        return not self._split.isdisjoint(self._graph.leaves(value))

    def _covered(self, value: Value) -> frozenset[frozenset[Axis]]:
        if value not in self._coverage:
            self._coverage[value] = coverage(value.axes, self._split)
        return self._coverage[value]

    def _check_shared(self, operator: Operator, split: list[Value]) -> None:
        """Refuse operators that are wrong for shards on several ranks, each of which has a partial gradient.

        All results of such shards must be split further before an operator sums over them.
        """
        shared = self._split & {self._leaves[0]}
        given = frozenset().union(*map(self._covered, split))
        for value in (*split, *operator.results):
            if self._split - shared in self._covered(value):
                raise LeftWhole(f"{operator.where} has the {self._leaves[1].size} parts of each, but not which of them")
        for value in operator.results:
            if shared in self._covered(value) and split and shared not in given:
                raise LeftWhole(f"{operator.where} gives a result without the {self._leaves[1].size} parts of each")
        for value in split:
            if shared in self._covered(value) and value.has_own_backward:
                raise LeftWhole(f"the backward of an input of {operator.where} is the model's own")
            read = (value.origin == PARAMETER and value.needs_gradient) and shared in self._covered(value)
            if read and (operator.call.path not in dict(value.names) or value in operator.call.inputs.values()):
                raise LeftWhole(f"{operator.where} reads a parameter of another module")

    def _is_partial_in(self, value: Value, operator: Operator) -> bool:
        """Return whether an operator reads a value before its reduction."""
        if value not in self._partial:
            return False
        call = self._reduced.get(value)
        return call is None or operator.call.is_within(call)

    # -- forward ----------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        waiting = sorted(
            {operator.index for leaf in self._split for operator in self._graph.operators_of.get(leaf, ())}
        )
        queued = set(waiting)
        while waiting:
            operator = self._graph.recording.operators[heapq.heappop(waiting)]
            for value in self._run(operator):
                for use in value.uses:
                    if use.index not in queued:
                        queued.add(use.index)
                        heapq.heappush(waiting, use.index)

    def _run(self, operator: Operator) -> Iterator[Value]:
        """Find the state of an operator's results; yield those that are partial."""
        inputs = operator.inputs
        split = [value for value in inputs if self.is_split(value)]
        partial = [value for value in inputs if self._is_partial_in(value, operator)]
        for value in split:
            if value.origin == INPUT:
                raise LeftWhole(f"an input of the model has the axis that {operator.where} reads")
            if any(sum(1 for axis in value.axes if leaf in axis.leaves()) > 1 for leaf in self._leaves):
                raise LeftWhole(f"two axes of one tensor would be split: {operator.where}")
        axes = self._graph.contractions.get(operator.index, ())
        summed = any(not self._split.isdisjoint(axis.leaves()) for axis in axes)
        if summed and coverage(axes, self._split) != {self._split}:
            raise LeftWhole(f"{operator.where} sums over elements of which only a part is split")
        if len(self._leaves) > 1:
            self._check_shared(operator, split)
        for value in operator.results:
            if self.is_split(value) and value in self._graph.outputs:
                raise LeftWhole(f"the model returns the result of {operator.where}")
        if summed:
            if partial or any(self.is_split(value) for value in operator.results):
                raise LeftWhole(f"{operator.where} sums over the axis and keeps it")
            self._leave_bias_out(operator)
        elif partial:
            if split or any(self.is_split(value) for value in operator.results):
                raise LeftWhole(f"{operator.where} combines a partial sum with shards")
            self._check_linear(operator, partial)
        elif split or any(self.is_split(value) for value in operator.results):
            self._of_shards(operator, split)
            return
        else:
            return
        self.placement.regions[operator.call.path] = None
        self._note_gradients(operator)
        for value in operator.results:
            if value.dtype.is_floating_point:
                self._partial.add(value)
                self._reduce(value, operator)
                yield value

    def _of_shards(self, operator: Operator, split: list[Value]) -> None:
        for value in operator.results:
            lost = split and not self.is_split(value) and value.uses and 0 not in value.shape
            if lost and operator.name in _MADE_NEW:
                continue
            if lost and operator.name not in _SEGMENTS:
                raise LeftWhole(f"{operator.where} gives a result without the axis")
            if lost:
                self._segments.append(value)
        self.placement.regions[operator.call.path] = None
        if operator.is_random:
            if any(self._covered(value) != {self._split} for value in operator.results if self.is_split(value)):
                raise LeftWhole(f"{operator.where} uses the RNG on elements of which only a part is split")
            self.placement.streams[operator.call.path] = None
        if any(self.is_split(value) for value in operator.results):
            self._note_gradients(operator)

    def _leave_bias_out(self, operator: Operator) -> None:
        """Accept the bias of a known layer, which its reduction adds."""
        bias = operator.arguments.get("self" if operator.name == "aten::addmm" else "bias")
        if not isinstance(bias, Value) or operator.name not in ("aten::addmm", "aten::convolution"):
            if operator.name in ("aten::baddbmm", "aten::addmv", "aten::addbmm"):
                raise LeftWhole(f"{operator.where} adds a tensor to a partial sum")
            return
        if bias.origin != PARAMETER or (operator.call.path, "bias") not in bias.names:
            raise LeftWhole(f"{operator.where} adds a tensor to a partial sum")
        self._left_out.add((operator, bias))
        self.placement.biases[operator.call.path] = None

    def _check_linear(self, operator: Operator, partial: list[Value]) -> None:
        """Refuse an operator that is not linear in a partial."""
        name, inputs = operator.name, [value for value in operator.inputs if value.dtype.is_floating_point]
        others = [value for value in inputs if value not in partial]
        tensors = [value for value in operator.inputs if value.shape or value in partial]
        is_linear = (
            name in _LINEAR
            or (name in _SCALED and len(partial) == 1 and operator.arguments.get("self") in partial)
            or (name in _SCALED and name.startswith("aten::mul") and len(partial) == 1)
            or (name in _ADDED and not others and not any(not isinstance(v, Value) for v in _terms(operator)))
            or (name in ("aten::mm", "aten::bmm") and len(partial) == 1)
            or (name in _INTO_ZEROS and all(_is_zero(value) for value in others))
            or (name in _ADDED and len(tensors) == 2 and all(_is_zero(value) for value in others))
            or (name in ("aten::masked_fill", "aten::masked_fill_") and operator.arguments.get("value") == 0)
            or name == "slapo::overwritten"
        )
        if not is_linear:
            raise LeftWhole(f"{operator.where} is not linear in a partial sum")

    def _reduce(self, value: Value, operator: Operator) -> None:
        """Reduce a partial at the output of the innermost module that returns it."""
        returning = (call for call in operator.call.chain() if value in call.outputs)
        call = next((call for call in returning if not any(use.call.is_within(call) for use in value.uses)), None)
        if call is None:
            if value in self._graph.outputs:
                raise LeftWhole(f"the model returns the partial sum of {operator.where}")
            return
        self._reduced[value] = call
        floating = [each for each in call.outputs if each.dtype.is_floating_point]
        position = (call.outputs.index(value),) if len(floating) > 1 else ()
        before = self.placement.sums.get(call.path)
        if before is not None and before != position:
            position = tuple(sorted({*before, *position}))
        self.placement.sums[call.path] = position

    # -- backward ---------------------------------------------------------------------------------------------

    def _note_gradients(self, operator: Operator) -> None:
        """Note unsharded inputs of an operator on shards: each rank sees a part of their gradients."""
        if not any(result.needs_gradient for result in operator.results):
            return
        for value in operator.inputs:
            if not value.needs_gradient or self.is_split(value) or self._is_partial_in(value, operator):
                continue
            if (operator, value) in self._left_out or not value.dtype.is_floating_point:
                continue
            self._use(value, operator)

    def _use(self, value: Value, operator: Operator) -> None:
        uses = self._partial_uses.setdefault(value, [])
        if operator not in uses:
            uses.append(operator)

    def _backward(self) -> None:
        self._placed.clear()
        self._complete_from.clear()
        self._passed_on.clear()
        seen: set[Value] = set()
        waiting: list[tuple[int, int, Value]] = []

        def push() -> None:
            for value in self._partial_uses:
                if value not in seen:
                    seen.add(value)
                    made = value.made_by.index if value.made_by is not None else -1
                    heapq.heappush(waiting, (-made, len(seen), value))

        push()
        while waiting:
            _, _, value = heapq.heappop(waiting)
            self._gather(value, self._partial_uses[value])
            push()
        for value in self._segments:
            if self._flows(value) and value not in self._passed_on:
                raise _ConflictError(self._flows(value), "the gradient of a full part of a concatenation is complete")

    def _flows(self, value: Value) -> list[Operator]:
        """Return the uses from which a gradient comes."""
        return [use for use in value.uses if any(result.needs_gradient for result in use.results)]

    def _gather(self, value: Value, uses: list[Operator]) -> None:
        """Choose where the gradient of a value becomes complete."""
        complete = [use for use in self._flows(value) if use not in uses]
        for use in uses:
            for result in use.results:
                is_shard = self.is_split(result) or result in self._partial or result in self._passed_on
                if result.needs_gradient and not is_shard and self._flows(result):
                    complete.append(use)

        def covers(call: Call) -> bool:
            return (
                value in call.inputs.values()
                and call.path not in self._forbidden
                and not any(use.call.is_within(call) for use in complete)
                and any(not call.path or path == call.path or path.startswith(f"{call.path}.") for path in self._paths)
            )

        groups: dict[str, list[Operator]] = {}
        for use in uses:
            groups.setdefault(_block(use.call.path), []).append(use)
        chosen: dict[Call, None] = {}
        for group in groups.values():
            chain = group[0].call.chain()
            lowest = [call for call in chain if covers(call) and all(use.call.is_within(call) for use in group)]
            if lowest:
                chosen[lowest[0]] = None
                continue
            for use in group:
                outermost = [call for call in use.call.chain() if covers(call)]
                if outermost:
                    chosen[outermost[-1]] = None
        if all(any(use.call.is_within(call) for call in chosen) for use in uses):
            self._complete_from[value] = list(chosen)
            for call in chosen:
                for key, each in call.inputs.items():
                    if each is value:
                        self._placed.setdefault(call.path, set()).add((call.number, key))
            return
        if value.origin == PARAMETER:
            self._sum_parameter(value, uses, complete)
            return
        if complete:
            raise _ConflictError(
                complete, f"the gradient of a tensor is complete in {complete[0].where} and partial in {uses[0].where}"
            )
        if value in self._partial:  # its gradient must be complete before it enters the layers that were summed
            raise LeftWhole(f"the gradient of a sum over the ranks is partial in {uses[0].where}")
        if value.made_by is None:
            raise LeftWhole(f"the gradient of a {value.origin} is partial in {uses[0].where}")
        if value.has_own_backward or value.changed_gradient:
            raise LeftWhole(f"the gradient that the model changes itself is partial in {uses[0].where}")
        self._passed_on.add(value)
        for each in value.made_by.inputs:
            if each.needs_gradient and not self.is_split(each):
                self._use(each, value.made_by)

    def _sum_parameter(self, value: Value, uses: list[Operator], complete: list[Operator]) -> None:
        for use in uses:
            name = next((own for path, own in value.names if path == use.call.path), None)
            if name is None:
                raise LeftWhole(f"{use.where} reads a parameter of another module")
            if any(other.call.path == use.call.path for other in complete):
                raise _ConflictError(complete, f"the gradient of a parameter is complete and partial in {use.where}")
            self.placement.parameters[(use.call.path, name)] = None

    def _check_calls(self, path: str, places: set[tuple[int, int | str]]) -> None:
        """Set the arguments whose gradients are summed, which must be the same in every call."""
        named: tuple[int | str, ...] | None = None
        is_all = True
        for call in self._graph.calls_of[path]:
            given = {key for key, value in call.inputs.items() if value.needs_gradient}
            own = {key for number, key in places if number == call.number}
            if not own and given:
                raise LeftWhole(f"a further call of {type(call.module).__name__} has no shards")
            if not own:
                continue
            names = {argument_name(call, key) for key in own}
            if any(argument_name(call, key) in names for key in given - own):
                raise LeftWhole(f"one argument of {type(call.module).__name__} holds complete and partial gradients")
            is_all = is_all and own == given
            keys = tuple(
                dict.fromkeys(key for key in (argument_name(call, key) for key in call.inputs) if key in names)
            )
            if named is not None and named != keys:
                raise LeftWhole(f"calls of {type(call.module).__name__} have gradients of different arguments")
            named = keys
        self.placement.gradients[path] = None if is_all else named

    # -- random numbers ---------------------------------------------------------------------------------------

    def _check_streams(self) -> None:
        """Leave out modules that use the RNG on full tensors besides: the ranks drop equal elements of their shards."""
        for path in list(self.placement.streams):
            calls = self._graph.calls_of[path]
            if any(
                not any(self.is_split(value) for value in operator.results)
                and any(operator.call.is_within(call) for call in calls)
                for operator in self._graph.random
            ):
                del self.placement.streams[path]


def _block(path: str) -> str:
    """Return the path of the outermost repeated block around a module."""
    levels = path.split(".")
    return ".".join(levels[: next((place + 1 for place, level in enumerate(levels) if level.isdigit()), 0)])


def argument_name(call: Call, key: int | str) -> int | str:
    """Return an argument by its name in the forward, or by its position."""
    start = str(key).partition(".")[0]
    if not start.isdigit():
        return start
    names = [
        each.name
        for each in inspect.signature(type(call.module).forward).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ][1:]
    return names[int(start)] if int(start) < len(names) else int(start)


def _terms(operator: Operator) -> list[object]:
    if "tensors" in operator.arguments:
        return list(operator.arguments["tensors"])
    return [operator.arguments.get("self"), operator.arguments.get("other")]


def _is_zero(value: Value) -> bool:
    """Return whether a tensor was made of zeros."""
    while value.made_by is not None and value.made_by.name in _SAME:
        value = value.made_by.arguments["self"]
    return value.made_by is not None and value.made_by.name in _ZEROS and value.origin not in (PARAMETER, BUFFER)
