"""Run a model with its shards without memory, and compare it with the reference recording operator by operator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import nn

import slapo_core as slapo
from slapo_core.errors import SlapoError
from slapo_core.internals import Internals
from slapo_models.auto.axes import PRODUCT, SUM, Axis
from slapo_models.auto.candidates import Candidate, Step, all_divisors, local_shape, local_size
from slapo_models.auto.placement import COPIES, Graph, LeftWhole
from slapo_models.auto.recording import CONSTANT, Call, Operator, Value, Watch, record, without_memory
from slapo_models.auto.situations import Situation
from slapo_models.auto.slices import Region

NAMES = {
    "shard": "tp.shard",
    "shard_attribute": "tp.shard_attribute",
    "sync": "tp.sync",
    "sync_gradient": "tp.sync_gradient",
    "fork_rng": "tp.fork_rng",
    "linear_cross_entropy": "loss.linear_cross_entropy",
}
_MOST_ATTEMPTS = 60
_Count = tuple[str, str]  # an attribute, and the option of `shard_attribute` that it needs
Shapes = Callable[[Value, Call | None], tuple[int, ...]]


class Mismatch(Exception):  # noqa: N818 - an answer, not an error
    """The scheduled model does something else than the reference model.

    Args:
        call: of the module where it differs; None outside of any.
        what: the difference.
        expected: the operator of the reference model there.
    """

    def __init__(self, call: Call | None, what: str, expected: Operator | None = None) -> None:
        super().__init__(what)
        self.call, self.what, self.expected = call, what, expected


def apply(schedule: slapo.Schedule, step: Step, location: str | None = None) -> None:
    """Apply a step with its reason as a note."""
    internals = Internals(schedule)
    primitive = internals.registry.load(NAMES[step.name], "primitives")(*step.arguments, **dict(step.options))
    internals.apply(internals.node(step.path), primitive, location=location, note=step.reason)


class Trial:
    """A copy of the model without memory, with a schedule of its own.

    Args:
        model: the reference model; only read.
        mesh: the sizes of the mesh.
        inputs: one batch.
        graph: the reference recording.
        others: further situations to run.
    """

    def __init__(
        self, model: nn.Module, mesh: Mapping[str, int], inputs: Any, graph: Graph, others: Sequence[Situation]
    ) -> None:
        self.schedule = slapo.create_schedule(without_memory(model), mesh=slapo.Mesh(mesh))
        self._inputs, self._graph, self.ranks, self._others = inputs, graph, mesh["tp"], others
        self._attributes: dict[type, tuple[_Count, ...]] = {}

    def settle(
        self, candidates: Sequence[Candidate], steps: Mapping[Candidate, list[Step]]
    ) -> tuple[dict[Candidate, list[Step]], dict[Candidate, str]]:
        """Find the attributes that the splits need, and leave out those that fail.

        Args:
            candidates: proved splits.
            steps: their steps.

        Returns:
            the splits that hold, with the steps for their attributes; and the others with the reason.
        """
        failed: dict[Candidate, str] = {}
        while True:
            kept = [each for each in candidates if each not in failed]
            refusal = self._apply(kept, steps, failed)
            if refusal:
                continue
            mismatch = self._run(kept)
            if mismatch is not None and not kept:
                return {}, failed  # the model differs from run to run
            if mismatch is not None and not self._search(mismatch, kept, steps):
                for each in self._to_blame(mismatch, kept):
                    failed[each] = mismatch.what
                continue
            if mismatch is not None:
                continue
            attributes = self._attribute_steps(kept)
            if self._finish(kept, steps, failed):
                self.schedule.undo(to=0)
                return attributes, failed

    def check(self, steps: Sequence[Step], regions: Sequence[Region], kept: Sequence[Candidate]) -> Mismatch | None:
        """Run all steps with slices of the sequence; return the first difference.

        Args:
            steps: all of them.
            regions: the slices in the recording and in each further situation.
            kept: the splits.
        """
        situations = [(self._graph, self._inputs, True, [each.leaves for each in kept])]
        situations += [(o.graph, o.inputs, o.training, [o.leaves[each] for each in kept]) for o in self._others]
        self.schedule.undo(to=0)
        try:
            for step in steps:
                if step.name == "linear_cross_entropy":  # its logits are never full
                    step = Step(step.path, "sync", ("fwd_post", "all_gather"))
                if step.name != "fork_rng":
                    apply(self.schedule, step)
        except SlapoError as error:
            return Mismatch(None, " ".join(error.message.split()))
        for (graph, inputs, training, own), region in zip(situations, regions, strict=True):
            mismatch = self._run_in(graph, inputs, own, training=training, shape=region.shape)
            if mismatch is not None:
                return mismatch
        return None

    def _apply(
        self, kept: list[Candidate], steps: Mapping[Candidate, list[Step]], failed: dict[Candidate, str]
    ) -> bool:
        self.schedule.undo(to=0)
        refused = False
        attributes = self._attribute_steps(kept)
        for each in kept:
            own = [step for step in steps[each] if step.name == "shard"]
            try:
                for step in (*own, *attributes[each]):
                    apply(self.schedule, step)
                for path in each.placement.biases:
                    self._require_bias_left_out(path)
            except LeftWhole as reason:
                failed[each], refused = str(reason), True
            except SlapoError as error:
                failed[each] = " ".join(error.message.split())
                refused = True
        return refused

    def _require_bias_left_out(self, path: str) -> None:
        """Require that a shard changed the forward of a layer, which adds its bias on every rank otherwise."""
        node = Internals(self.schedule).node(path)
        if not node.wrappers:
            raise LeftWhole(f"{type(node.module).__name__} adds its bias to a partial sum")

    def _finish(
        self, kept: list[Candidate], steps: Mapping[Candidate, list[Step]], failed: dict[Candidate, str]
    ) -> bool:
        """Apply the collectives; whether none was refused."""
        before = len(failed)
        for each in kept:
            try:
                for step in steps[each]:
                    if step.name != "shard":
                        apply(self.schedule, step)
            except SlapoError as error:
                failed[each] = " ".join(error.message.split())
        return len(failed) == before

    def _run(self, kept: list[Candidate]) -> Mismatch | None:
        """Run in every situation; return the first difference."""
        found = self._run_in(self._graph, self._inputs, [each.leaves for each in kept], training=True)
        for other in self._others:
            if found is None:
                leaves = [other.leaves[each] for each in kept if other.leaves[each]]
                found = self._run_in(other.graph, other.inputs, leaves, training=other.training)
        return found

    def _run_in(
        self,
        graph: Graph,
        inputs: Any,
        split: Sequence[tuple[Axis, ...]],
        *,
        training: bool,
        shape: Shapes | None = None,
    ) -> Mismatch | None:
        changed = {record.path for record in self.schedule.records if record.name == "tp.shard"}
        if shape is not None:  # a head that is tied to a vocabulary
            nodes = self.schedule.root.walk()
            changed |= {each.path for each in nodes if any(each.layout(name).is_sharded for name in each.parameters)}
        watch = _Comparison(graph, all_divisors(split, self.ranks), changed, shape)
        try:
            record(self.schedule.model, inputs, watch, training=training)
        except Mismatch as mismatch:
            mismatch.expected = watch.expected(mismatch.call)
            return mismatch
        except Exception as error:  # noqa: BLE001 - whatever the model raises with wrong sizes
            text = " ".join(str(error).split())[:120]
            following = watch.expected(watch.running, following=True)
            return Mismatch(watch.running, f"it raises {type(error).__name__}: {text}", following)
        return None

    # -- attributes -------------------------------------------------------------------------------------------

    def _attribute_steps(self, kept: Sequence[Candidate]) -> dict[Candidate, list[Step]]:
        """Return the steps for attributes, each module's with the first split that needs them."""
        found: dict[Candidate, list[Step]] = {each: [] for each in kept}
        seen: set[str] = set()
        for each in kept:
            for path in each.placement.regions:
                module = self.schedule.model.get_submodule(path)
                counts = [own for own in self._attributes.get(type(module), ()) if _value(module, own[0]) is not None]
                for option in dict.fromkeys(option for _, option in counts) if path not in seen else ():
                    own = tuple(name for name, its in counts if its == option)
                    if len(each.leaves) == 1 and option == "holders_of":
                        continue
                    options = ((option, each.leaves[0].size),) if option and len(each.leaves) > 1 else ()
                    reason = f"its forward reads {' and '.join(own)} as the extent of a shard"
                    given = own[0] if len(own) == 1 else own
                    found[each].append(Step(path, "shard_attribute", (given,), options, reason))
                    seen.add(path)
        return found

    def _search(self, mismatch: Mismatch, kept: list[Candidate], steps: Mapping[Candidate, list[Step]]) -> bool:
        """Find attributes of the module's class that make it run as expected."""
        call = mismatch.call
        while call is not None:
            owners = [each for each in kept if call.path in each.placement.regions]
            if (
                owners
                and type(call.module) not in self._attributes
                and self._search_in(call, mismatch, owners, kept, steps)
            ):
                return True
            call = call.around
        return False

    def _search_in(
        self,
        call: Call,
        mismatch: Mismatch,
        owners: list[Candidate],
        kept: list[Candidate],
        steps: Mapping[Candidate, list[Step]],
    ) -> bool:
        """Add the attributes one by one that bring the run further, or two at once."""
        module = self.schedule.model.get_submodule(call.path)
        cls, counts = type(module), {count for each in owners for count in each.counts}
        names = _choices(module, counts, self.ranks)
        chosen: tuple[_Count, ...] = ()
        reached = mismatch.expected.index if mismatch.expected is not None else -1
        while True:
            best: tuple[int, tuple[_Count, ...]] = (reached, ())
            rest = [each for each in names if each[0] not in dict(chosen)]
            for number in (1, 2):
                for added in itertools.islice(itertools.combinations(rest, number), _MOST_ATTEMPTS):
                    self._attributes[cls] = (*chosen, *added)
                    if self._apply(kept, steps, {}):
                        continue
                    after = self._run(kept)
                    if after is None or after.call is None or not isinstance(after.call.module, cls):
                        return True
                    at = after.expected.index if after.expected is not None else -1
                    if at > best[0]:
                        best = (at, (*chosen, *added))
                if best[1]:
                    break
            if not best[1]:
                self._attributes.pop(cls, None)
                return False
            reached, chosen = best

    def _to_blame(self, mismatch: Mismatch, kept: list[Candidate]) -> list[Candidate]:
        if mismatch.expected is not None:
            values = (*mismatch.expected.inputs, *mismatch.expected.results)
            leaves = {leaf for value in values for leaf in self._graph.leaves(value)}
            found = [each for each in kept if not leaves.isdisjoint(each.leaves)]
            if found:
                return self._alike(found, kept)
        call = mismatch.call
        while call is not None:
            kinds = {type(call.module)}
            found = [
                each
                for each in kept
                if any(type(self._graph.calls_of[path][0].module) in kinds for path in each.placement.regions)
            ]
            if found and call.path:
                return found
            call = call.around
        return kept

    def _alike(self, found: list[Candidate], kept: list[Candidate]) -> list[Candidate]:
        """Return the splits of the same tensors in repeated blocks."""
        kinds = {_kinds(each) for each in found}
        return [each for each in kept if _kinds(each) in kinds]


def _kinds(candidate: Candidate) -> tuple[str, ...]:
    paths = (".".join(filter(None, name)) for member in candidate.members for name in member.names[:1])
    return tuple(".".join("*" if level.isdigit() else level for level in path.split(".")) for path in paths)


def _value(module: nn.Module, name: str) -> int | None:
    owner: Any = module
    *before, own = name.split(".")
    for part in before:
        owner = getattr(owner, part, None)
    value = getattr(owner, own, None)
    return value if type(value) is int else None


def _choices(module: nn.Module, counts: set[tuple[int, str]], ranks: int) -> list[_Count]:
    """Return the attributes that the forward reads and that hold such a count."""
    read, config = _names_read(type(module)), getattr(module, "config", None)
    owned = {name: value for name, value in vars(module).items() if name in read}
    if "config" in read and hasattr(config, "__dict__"):
        owned |= {f"config.{name}": value for name, value in vars(config).items() if name in read}
    found = [
        (value, name, option)
        for name, value in owned.items()
        for count, option in counts
        if type(value) is int and value == count and (option or value % ranks == 0)
    ]
    return [(name, option) for _, name, option in sorted(found)]  # counts of heads first, then widths


def _names_read(cls: type) -> set[str]:
    """Return the names in the code of a class's methods, and of the functions that it names."""
    found: set[str] = set()
    seen: set[CodeType] = set()

    def enter(code: CodeType, scope: Mapping[str, Any], depth: int) -> None:
        if code in seen or depth > 3:
            return
        seen.add(code)
        found.update(code.co_names)
        found.update(each for each in code.co_consts if isinstance(each, str))
        for const in code.co_consts:
            if isinstance(const, CodeType):
                enter(const, scope, depth)
        for name in code.co_names:
            value = scope.get(name)
            if isinstance(value, FunctionType):
                enter(value.__code__, value.__globals__, depth + 1)

    for base in cls.__mro__:
        if base is nn.Module:
            break
        for name, value in vars(base).items():
            function = getattr(value, "__wrapped__", value)
            if isinstance(function, FunctionType) and name != "__init__":
                enter(function.__code__, function.__globals__, 0)
    return found


_RESIZED = frozenset(f"aten::{name}" for name in ("split", "slice", "convolution"))
"""Operators with numbers that depend on sizes: of a shard, from its start to its end, of groups of channels."""
_REPEATS = COPIES | {f"aten::{name}" for name in ("unsqueeze", "expand", "view", "_unsafe_view")}


def _alike(operator: Operator) -> str:
    return "aten::view" if operator.name == "aten::_unsafe_view" else operator.name


class _Comparison(Watch):
    """Compare a recording with the reference.

    Args:
        graph: the reference.
        by: what the sizes of leaves are divided by.
        changed: paths of modules whose forward a step changed.
        shape: of a result of an operator, or of an output behind a call; None: of shards.
    """

    def __init__(self, graph: Graph, by: Mapping[Axis, int], changed: set[str], shape: Shapes | None = None) -> None:
        self._graph, self._by, self._changed = graph, by, changed
        self._shape = shape or (lambda value, call: local_shape(value, by))
        self._positions: dict[Call, int] = {}
        self.running: Call | None = None

    def expected(self, call: Call | None, *, following: bool = False) -> Operator | None:
        """Return the operator of the reference model where a call is, or the one after it."""
        calls = self._graph.calls_of.get(call.path, ()) if call is not None else ()
        if call is None or call.number >= len(calls):
            return None
        position = self._positions.get(call, 0) - (0 if following else 1)
        operators = calls[call.number].operators
        return operators[position] if 0 <= position < len(operators) else None

    def _reference(self, call: Call) -> Call:
        calls = self._graph.calls_of.get(call.path, ())
        if call.number >= len(calls):
            raise Mismatch(call, "a module is called more often than in the reference model")
        return calls[call.number]

    def after_operator(self, operator: Operator) -> None:
        call = operator.call
        self.running = call
        if call.path in self._changed or not self._graph.calls_of.get(call.path) or operator.name in COPIES:
            return
        if operator.name.startswith("collective::"):
            return
        expected = self._next(call, operator)
        if expected is None:
            raise Mismatch(call, f"{operator.where} does not run in the reference model")
        if _alike(operator) != _alike(expected):
            raise Mismatch(call, f"{operator.where} runs instead of {expected.where}")
        for own, other in zip(operator.results, expected.results, strict=False):
            self._compare(call, own, self._shape(other, None), operator.where)
        if operator.name not in _RESIZED and _numbers(operator) != _numbers(expected):
            raise Mismatch(call, f"{operator.where} gets another number")
        if operator.name == "aten::slice" and not self._starts_alike(operator, expected):
            raise Mismatch(call, f"{operator.where} begins at another element")

    def _next(self, call: Call, operator: Operator) -> Operator | None:
        """Return the operator of the reference model that is next in a call."""
        rest = self._reference(call).operators
        position = self._positions.get(call, 0)
        while position < len(rest) and rest[position].name in COPIES:
            position += 1
        while position < len(rest) and _alike(operator) != _alike(rest[position]):
            behind = self._behind_repeat(rest, position)
            if behind is None:
                break
            position = behind
        self._positions[call] = position + 1
        return rest[position] if position < len(rest) else None

    def _behind_repeat(self, operators: Sequence[Operator], start: int) -> int | None:
        """Return where operators end that repeat a tensor (KV heads) that a rank needs once; None: none do."""
        first: Any = operators[start].arguments.get("self")
        value = first
        for position in range(start, len(operators)):
            operator = operators[position]
            if operator.name not in _REPEATS or operator.arguments["self"] is not value:
                return None
            value = operator.results[0]
            before, after = (local_shape(each, self._by) for each in (first, value))
            if math.prod(before) != math.prod(after):
                return None
            if before == after and first.shape != value.shape:
                return position + 1
        return None

    def after_call(self, call: Call) -> None:
        reference = self._reference(call)
        self.running = call.around
        if len(call.outputs) != len(reference.outputs):
            raise Mismatch(call, "a module returns another number of tensors")
        for own, other in zip(call.outputs, reference.outputs, strict=True):
            self._compare(call, own, self._shape(other, reference), f"the output of {type(call.module).__name__}")
        rest = reference.operators[self._positions.get(call, 0) :]
        if call.path not in self._changed and any(operator.name not in COPIES for operator in rest):
            raise Mismatch(call, "fewer operators run than in the reference model")

    def _compare(self, call: Call, own: Value, expected: tuple[int, ...], where: str) -> None:
        if own.shape != expected:
            raise Mismatch(call, f"{where} gives shape {own.shape} where the shard has {expected}")

    def _starts_alike(self, operator: Operator, expected: Operator) -> bool:
        source = expected.arguments["self"]
        dim = expected.arguments.get("dim", 0) % len(source.shape)
        axis = source.axes[dim]
        starts = [_start(each) for each in (operator, expected)]
        if self._by.keys().isdisjoint(axis.leaves()):
            return starts[0] == starts[1]
        return starts[0] == _local_start(axis, starts[1], self._by)


def _start(operator: Operator) -> int:
    size = operator.arguments["self"].shape[operator.arguments.get("dim", 0)]
    start = operator.arguments.get("start") or 0
    return min(max(start + size if start < 0 else start, 0), size)


def _local_start(axis: Axis, start: int, by: Mapping[Axis, int]) -> int | None:
    """Return where an element that begins a segment lies in a shard; None within a segment."""
    axis = axis.found()
    if start == 0:
        return 0
    if axis.kind == SUM:
        local = 0
        for part in axis.parts:
            if start < part.size:
                inside = _local_start(part, start, by)
                return None if inside is None else local + inside
            start -= part.size
            local += local_size(part, by)
        return local
    if axis.kind == PRODUCT:
        outer, *rest = axis.factors()
        inner, local = 1, 1
        for factor in rest:
            inner *= factor.size
            local *= local_size(factor, by)
        if start % inner:
            return None
        begin = _local_start(outer, start // inner, by)
        return None if begin is None else begin * local
    return None if axis in by else start


def _numbers(operator: Operator) -> list[object]:
    """Return the numbers among an operator's arguments, and the elements of constants."""
    own = [value for value in operator.arguments.values() if type(value) in (int, float, bool, str)]
    return [*own, *(value.numbers for value in operator.inputs if value.origin == CONSTANT)]
