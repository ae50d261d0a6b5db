"""Answer the hook `slapo_partition`: record the model once, and cut it after the marked calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from slapo_core import TraceError, hookimpl
from slapo_core.errors import place
from slapo_core.internals import forwards
from slapo_graph.flat import FlatGraph, flat, graph_function, set_state, sets_variables
from slapo_pipeline.partition.placement import NodePlacement, Uncuttable, title
from slapo_pipeline.partition.segments import Assembly, Segment, Segments, settle_shared_modules, settle_writes
from slapo_pipeline.partition.stage import CutStage, StageProgram, signature, ties_of
from slapo_pipeline.rules import above_violations
from slapo_pipeline.split import cuts_of
from slapo_runtime.stages.partition import Output, Partition, Stage, Value

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.primitive import Record


@hookimpl(trylast=True)  # a plugin that names its own partition replaces this one
def slapo_partition(
    schedule: Schedule, inputs: Mapping[str, Any], batch_axes: Mapping[str, int | None]
) -> Partition | None:
    """Return the stages between the cuts of :class:`slapo_pipeline.PipelineSplit`.

    Source: paper section 3.3.2, partition propagation.
    """
    cuts = cuts_of(schedule.records)
    if not cuts:
        return None
    _require_calls(schedule, cuts)
    try:
        flat = recorded(schedule.model, inputs, cuts)
    except TraceError as error:
        raise _unrecorded(error, cuts) from error
    _require_calls(schedule, cuts)  # a first call may register hooks
    if isinstance(flat.needs_values, TraceError) and schedule.mesh is not None and schedule.mesh.size("pp") > 1:
        raise _unrecorded(flat.needs_values, cuts)  # no rank has the values of all stages
    try:
        return _Cutting(flat, list(cuts), inputs).partition()
    except Uncuttable as error:
        raise TraceError(
            f"cannot cut after '{error.path}' ({cuts[error.path]}): {error.problem}",
            path=error.path,
            location=error.location,
            hint=error.hint,
        ) from error


def _require_calls(schedule: Schedule, cuts: Mapping[str, Record]) -> None:
    """Refuse hooks and wrappers of modules above a cut."""
    for path, record in cuts.items():
        for violation in above_violations(schedule.root[path]):
            raise TraceError(
                f"cannot cut after '{path}' ({record}): {violation.message}", path=path, hint=violation.hint
            )


_OF_MODULES_BELOW = (", which uses the data pointer", ", and neither returned nor ")
"""Parts of messages about modules below the cuts, which no cut divides."""


def _unrecorded(error: TraceError, cuts: Mapping[str, Record]) -> TraceError:
    """Return the error for modules above cuts that cannot be recorded."""
    first, *others = dict.fromkeys(map(str, cuts.values()))
    more = f" and {len(others)} more" if others else ""
    above = ", ".join(place(path) for path in sorted(ancestors(cuts)))
    hint = f"cut elsewhere, so that this code lies inside one stage: modules above a cut ({above}) are divided"
    if " sets self." in error.message:
        hint = f"if only the first call does so, call the model once before; else {hint}"
    elif "whose shape depends on values" in error.message:
        hint = "do it in a module inside one stage, and return tensors of known shapes, e.g. by index_add"
    elif error.hint is not None and any(part in error.message for part in _OF_MODULES_BELOW):
        hint = error.hint
    return TraceError(f"cannot cut the model ({first}{more}): {error.message}", location=error.location, hint=hint)


class _Cutting:
    def __init__(self, flat: FlatGraph, cuts: list[str], inputs: Mapping[str, Any]) -> None:
        self.flat, self.inputs = flat, inputs
        self.placement = NodePlacement(flat, cuts)
        self.segments = Segments(flat, self.placement)
        self._names: dict[fx.Node, str] = {}
        modules = dict(flat.module.named_modules())
        self._order = {path: number for number, path in enumerate(modules)}
        self._taken: set[str] = set()
        self._lists = tuple(_containers(flat, modules))

    def partition(self) -> Partition:
        assembly = Assembly(self.segments, self.name)
        settle_shared_modules(self.segments)
        settle_writes(self.segments, assembly.names)
        values = {self.name(node): self._value(node) for each in self.segments.segments for node in each.makes}
        programs = [self._program(segment, values) for segment in self.segments.segments]
        self.flat.forget()
        output = Output(tuple(assembly.names.values()), assembly.assemble)
        return _bound([self.flat] * len(programs), programs, values, output)

    def name(self, node: fx.Node) -> str:
        """Return the unique name of a node's value."""
        if node not in self._names:
            wanted = title(node)
            name, number = wanted, 1
            while name in self._taken:
                name, number = f"{wanted}_{number}", number + 1
            self._taken.add(name)
            self._names[node] = name
        return self._names[node]

    def _value(self, node: fx.Node) -> Value:
        tensor = self.flat.values[node]
        consumers = tuple(each.index for each in self.segments.segments if node in each.uses)
        home = self.placement.home(node)
        return Value(self.name(node), home, consumers, tuple(tensor.shape), tensor.dtype, bool(tensor.requires_grad))

    def _program(self, segment: Segment, values: Mapping[str, Value]) -> StageProgram:
        called = {str(node.target) for node in segment.graph.nodes if node.op == "call_module"}
        made = {self.name(node): segment.known[node] for node in segment.makes}
        segment.graph.output(made)
        sources = [self._source(*segment.sources[node]) for node in segment.graph.nodes if node.op == "placeholder"]
        taken = {what for kind, what in sources if kind == "input"}
        cuts = self.placement.cuts
        return StageProgram(
            graph_function(segment.graph),
            sources,
            inputs={name: signature(self.inputs[name]) for name in self.inputs if name in taken},
            values={name: (values[name].shape, values[name].dtype) for name in map(self.name, segment.uses)},
            makes={name: (values[name].shape, values[name].dtype, values[name].requires_grad) for name in made},
            called=tuple(sorted(called, key=self._order.__getitem__)),  # in the model's order: ancestors first
            read=tuple(dict.fromkeys(str(node.target) for node in segment.graph.nodes if node.op == "get_attr")),
            lists=self._lists,
            last=cuts[segment.index] if segment.index < len(cuts) else None,
            switches=any(node.target is set_state for node in segment.graph.nodes),
            sets_variables=sets_variables(segment.graph),
        )

    def _source(self, kind: str, what: Any) -> tuple[str, Any]:
        if kind == "captured":
            return "constant", self.flat.captured[what]
        return kind, self.name(what) if kind == "value" else what


def _bound(
    flats: Sequence[FlatGraph], programs: Sequence[StageProgram], values: Mapping[str, Value], output: Output
) -> Partition:
    """Bind programs to copies of one model, one graph per stage."""
    stages = tuple(
        Stage(
            index,
            CutStage(index, flat, program),
            tuple(program.inputs),
            tuple(program.values),
            tuple(program.makes),
            program.last,
        )
        for index, (flat, program) in enumerate(zip(flats, programs, strict=True))
    )

    def bind(models: Sequence[nn.Module]) -> Partition | None:
        if any(map(_holds_objects, programs)):
            return None
        others = {id(model): flats[0].of_copy(model) for model in models}
        found = [flat for model in models if (flat := others[id(model)]) is not None]
        return _bound(found, programs, values, output) if len(found) == len(programs) else None

    return Partition(stages, values, ties_of(stages, flats[0].module), output, bind)


def _containers(flat: FlatGraph, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the containers that code above the cuts may iterate."""
    called = {str(node.target) for node in flat.graph.nodes if node.op == "call_module"}
    inside = tuple(f"{path}." for path in called)
    for path, module in modules.items():
        kinds = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
        if isinstance(module, kinds) and path not in called and not path.startswith(inside):
            yield path


def _holds_objects(program: StageProgram) -> bool:
    """Return whether a stage uses an object that may belong to the model."""
    return any(kind == "constant" and not isinstance(what, torch.Tensor) for kind, what in program.sources)


def ancestors(paths: Collection[str]) -> frozenset[str]:
    """Return the paths of all ancestors of ``paths``; the root is ``""``."""
    return frozenset(path[:end] for path in paths for end in range(len(path)) if path[end] == ".") | {""}


def recorded(root: nn.Module, inputs: Mapping[str, Any], cuts: Collection[str]) -> FlatGraph:
    """Record the model: ancestors of cuts inlined, all other modules called.

    Args:
        root: the scheduled model.
        inputs: by parameter of its forward.
        cuts: paths.

    Raises:
        TraceError: it cannot be recorded.
    """
    above = ancestors(cuts)
    with torch.enable_grad():
        return flat(root, _called(root), _separated(inputs), lambda module, path: path not in above)


def _called(root: nn.Module) -> Callable[..., Any]:
    """Return the class's forward, or the class's override of ``__call__``."""
    forward = type(root).forward
    if not any(forwards.overrides_of_call(type(root))):
        return forward

    @functools.wraps(forward)
    def called(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    called.slapo_calls_module = True  # type: ignore[attr-defined]
    return called


def _separated(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Give each argument a tensor object of its own."""
    seen: set[int] = set()
    found = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and id(value) in seen:
            found[name] = value.detach().requires_grad_(value.requires_grad)
        else:
            found[name] = value
        seen.add(id(value))
    return found
