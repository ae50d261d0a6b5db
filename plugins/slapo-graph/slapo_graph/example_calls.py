"""Calls of each module when the model runs on the schedule's example inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from slapo_core.errors import ArgumentError, TraceError
from slapo_graph import examples

if TYPE_CHECKING:
    from torch import nn

    from slapo_core import Node
    from slapo_core.primitive import Record
    from slapo_core.schedule.schedule import Schedule

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class ExampleCalls:
    """The calls of one run without values.

    Args:
        model: the reference model.
        example_inputs: of the schedule.

    Raises:
        ArgumentError: there are none.
    """

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        if example_inputs is None:
            raise ArgumentError(
                "tracing runs the model once, without values, to record each module's arguments, and this "
                "schedule has no example inputs",
                hint="create_schedule(model, example_inputs={'input_ids': ids}), or trace(example_inputs=...) with "
                "this module's arguments",
            )
        self._calls, self._error = examples.example_calls(model, example_inputs)

    def of(self, path: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments of the first call of the module at ``path``.

        Raises:
            TraceError: the run raised before, or never called the module.
        """
        if path in self._calls:
            return self._calls[path]
        where = f"'{path}'" if path else "the root"
        hint = "trace(example_inputs=...), with this module's arguments"
        if self._error is None:
            raise TraceError(f"the model does not call {where} on the example inputs", path=path, hint=hint)
        raise TraceError(
            f"the arguments of {where} are not known: on inputs without values the model raises "
            f"{type(self._error).__name__}: {self._error}",
            path=path,
            hint=hint,
        ) from self._error


@dataclass
class _Kept:
    """What was found out about one schedule."""

    reference: ExampleCalls | None = None
    scheduled: dict[str, Call] = field(default_factory=dict)  # of a run with steps in force
    steps: tuple[Record, ...] = ()  # these


_KEPT: WeakKeyDictionary[Schedule, _Kept] = WeakKeyDictionary()
"""Results of runs: a cache, which goes with its schedule."""


def example_call(node: Node) -> Call:
    """Return arguments that a module is called with when the reference model runs on the schedule's example inputs.

    They are tensors without values, from a run of the whole model on such; of several calls, those of the first.

    Raises:
        TraceError: the model cannot run without values, or does not call this module.
        ArgumentError: the schedule has no example inputs.
    """
    schedule = _schedule_of(node)
    kept = _KEPT.setdefault(schedule, _Kept())
    if kept.reference is None:
        with schedule.rewound(0) as model:
            kept.reference = ExampleCalls(model, schedule.example_inputs)
    return kept.reference.of(node.path)


def example_calls(node: Node) -> Iterator[Call]:
    """Yield candidates for the arguments of a module, for a primitive that tries them until one fits.

    That of the reference model, as :func:`example_call` gives it, and that of the model as the steps have made it so
    far, where blocks may hand on shards. A run of the scheduled model takes place only if it is asked for, and serves
    the modules after it, too.

    Raises:
        TraceError: neither run calls this module.
        ArgumentError: the schedule has no example inputs.
    """
    schedule, path = _schedule_of(node), node.path
    kept = _KEPT.setdefault(schedule, _Kept())
    if kept.steps != schedule.records[: len(kept.steps)]:
        kept.scheduled, kept.steps = {}, ()
    if path in kept.scheduled:
        yield kept.scheduled[path]
    unknown = None
    try:
        yield example_call(node)
    except TraceError as error:
        unknown = error
    ended = None
    if schedule.records:
        kept.scheduled, ended = examples.scheduled_calls(schedule.model, schedule.example_inputs)
        kept.steps = schedule.records
    if path in kept.scheduled:
        yield kept.scheduled[path]
    elif ended is not None:
        raise TraceError(
            f"the scheduled model does not run as far as '{path}': it raises {type(ended).__name__}: {ended}",
            path=path,
            hint="complete the steps at the modules that run before, or trace(example_inputs=...) with what this "
            "module is called with",
        ) from ended
    elif unknown is not None:
        raise unknown


def _schedule_of(node: Node) -> Schedule:
    """Return the schedule itself, also for a node of a read-only copy."""
    found: Schedule = getattr(node.schedule, "_original", node.schedule)
    return found
