"""Example arguments of every module: those with which the model calls it on the schedule's example inputs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from slapo_core.errors import ArgumentError, TraceError
from slapo_core.internals import copies, forwards
from slapo_core.layout import fork_rng
from slapo_graph.leaves import inlined_modules
from slapo_graph.match import name_of
from slapo_graph.private import TABLES, FakeTensor, SafeMetaTensors
from slapo_graph.tracing.fake import FakeMode, with_tensors
from slapo_graph.tracing.outside import Outside
from slapo_graph.tracing.reads import GlobalNames
from slapo_graph.tracing.session import caches_restored, rng_restored
from slapo_graph.variants import RecordedForward

if TYPE_CHECKING:
    from slapo_core import Node, Schedule
    from slapo_core.primitive import Record

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


# The calls of one schedule.


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
        self._calls, self._error = reference_calls(model, example_inputs)

    def of(self, path: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments of the first call of the module at ``path``.

        Raises:
            TraceError: the run raised before, or never called the module.
        """
        if path in self._calls:
            return self._calls[path]
        where = name_of(path)
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
class _KnownCalls:
    """The known calls of one schedule."""

    reference: ExampleCalls | None = None
    scheduled: dict[str, Call] = field(default_factory=dict)  # of the last run with steps in force
    steps: tuple[Record, ...] = ()  # these


_KNOWN_CALLS: WeakKeyDictionary[Schedule, _KnownCalls] = WeakKeyDictionary()
"""Results of runs: a cache, freed with its schedule."""


def example_call(node: Node) -> Call:
    """Return the arguments of a module in a run of the reference model on the example inputs.

    Fake tensors, of the module's first call in a run of the entire model.

    Raises:
        TraceError: the model cannot run without values, or does not call this module.
        ArgumentError: the schedule has no example inputs.
    """
    schedule = _schedule_of(node)
    known_calls = _KNOWN_CALLS.setdefault(schedule, _KnownCalls())
    if known_calls.reference is None:
        with schedule.rewound(0) as model:
            known_calls.reference = ExampleCalls(model, schedule.example_inputs)
    return known_calls.reference.of(node.path)


def example_calls(node: Node) -> Iterator[Call]:
    """Yield candidates for the arguments of a module, to be tried in their order.

    First the reference model's, of :func:`example_call`; then the scheduled model's, whose blocks may pass on shards.
    The scheduled model runs only if the second is asked for, once for all modules after it.

    Raises:
        TraceError: neither run calls this module.
        ArgumentError: the schedule has no example inputs.
    """
    schedule, path = _schedule_of(node), node.path
    known_calls = _KNOWN_CALLS.setdefault(schedule, _KnownCalls())
    if known_calls.steps != schedule.records[: len(known_calls.steps)]:
        known_calls.scheduled, known_calls.steps = {}, ()
    if path in known_calls.scheduled:
        yield known_calls.scheduled[path]
    unknown = None
    try:
        yield example_call(node)
    except TraceError as error:
        unknown = error
    ended = None
    if schedule.records:
        known_calls.scheduled, ended = scheduled_calls(schedule.model, schedule.example_inputs)
        known_calls.steps = schedule.records
    if path in known_calls.scheduled:
        yield known_calls.scheduled[path]
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


# One run of a model.


def reference_calls(model: nn.Module, example_inputs: Any) -> tuple[dict[str, Call], Exception | None]:
    """Run a model once on fake tensors, and note the first call of every module.

    A model that needs values (to branch on, or as indices) runs on the inputs themselves, if it has values.

    Args:
        model: on any device, ``meta`` too; nothing in it is changed.
        example_inputs: a mapping (keyword arguments), a tuple (positional ones), or one argument.

    Returns:
        the arguments by path, as far as the run came; the error that ended it, or None.
    """
    args, kwargs = call_with(example_inputs)
    tensors = [*model.parameters(), *model.buffers()]
    if all(type(tensor) in (nn.Parameter, torch.Tensor) for tensor in tensors):
        # The meta device takes a third of the time of fake tensors, and not all models.
        calls, error = _run_on_meta(model, args, kwargs)
        if error is None:
            devices = {tensor.device for tensor in tensors}
            device = devices.pop() if devices else torch.device("cpu")
            if not devices:
                return _PlacedCalls(calls, device), None
    with torch.no_grad():
        calls, error = _run(copied_model(model), args, kwargs, FakeMode())
    if error is None or any(tensor.is_meta for tensor in tensors):
        return calls, error
    return _run_with_values(lambda: (copied_model(model), ()), args, kwargs)


def scheduled_calls(model: nn.Module, example_inputs: Any) -> tuple[dict[str, Call], Exception | None]:
    """Note the first call of every module of a scheduled model, on fake tensors if it runs on these.

    Modules with an unrewritten graph run their own forward. Calls inside of a rewritten graph are not noted.

    Args:
        model: on any device, ``meta`` too; nothing in it is changed.
        example_inputs: a mapping (keyword arguments), a tuple (positional ones), or one argument.

    Returns:
        the arguments by path, as far as the run came; the error that ended it, or None.
    """
    args, kwargs = call_with(example_inputs)
    copied, inlined = _own_forwards(model)
    calls, error = _run(copied, args, kwargs, FakeMode(), unnoted=inlined)
    if error is None or any(tensor.is_meta for tensor in model.parameters()):
        return calls, error
    with_values, raised = _run_with_values(lambda: _own_forwards(model), args, kwargs)
    return (calls, error) if raised is not None else (with_values, None)


def _own_forwards(model: nn.Module) -> tuple[nn.Module, set[nn.Module]]:
    """Return a copy without unrewritten graphs, and the modules inlined in rewritten ones."""
    copied = copied_model(model)
    inlined: set[nn.Module] = set()  # a hook there would make another graph
    for module in copied.modules():
        forward = module.__dict__.get("forward")
        if not isinstance(forward, forwards.ModuleForward):
            continue
        graph = getattr(forward.base, "__func__", None)
        if isinstance(graph, RecordedForward) and graph.is_rewritten:
            inlined |= {below for path, below in inlined_modules(module, graph.leaves).items() if path}
        elif isinstance(graph, RecordedForward) and not forward.has_own:
            forward.set_base(None)
    return copied, inlined


def call_with(example_inputs: Any) -> Call:
    """Split example inputs into positional and keyword arguments.

    Args:
        example_inputs: a mapping (keyword arguments), a tuple (positional ones), or one argument.
    """
    if isinstance(example_inputs, Mapping):
        return (), {str(name): value for name, value in example_inputs.items()}
    return example_inputs if isinstance(example_inputs, tuple) else (example_inputs,), {}


class _PlacedCalls(dict[str, Call]):
    """Calls on the meta device, given out for the device of the model."""

    def __init__(self, calls: dict[str, Call], device: torch.device) -> None:
        super().__init__(calls)
        self._device = device
        self._mode = FakeMode()

    def __getitem__(self, path: str) -> Call:
        args, kwargs = super().__getitem__(path)
        if self._device.type == "meta":
            return args, kwargs
        placed: Call = with_tensors((args, kwargs), self._place)
        return placed

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return FakeTensor(self._mode, tensor, self._device) if tensor.is_meta else tensor


def _run_on_meta(model: nn.Module, args: Any, kwargs: Any) -> tuple[dict[str, Call], Exception | None]:
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        made = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made
    with torch.no_grad(), SafeMetaTensors():
        return _run(copied_model(model, memo), args, kwargs, None, own=lambda tensor: tensor.to("meta"))


def _run_with_values(
    copy_model: Callable[[], tuple[nn.Module, Collection[nn.Module]]], args: Any, kwargs: Any
) -> tuple[dict[str, Call], Exception | None]:
    """Run copies on real tensors; in evaluation mode too, for modules that training skips at random."""
    with fork_rng(), torch.no_grad():
        copied, unnoted = copy_model()
        calls, error = _run(copied, args, kwargs, None, unnoted)
        if error is None and copied.training:
            copied, unnoted = copy_model()
            calls = {**_run(copied.eval(), args, kwargs, None, unnoted)[0], **calls}
    return calls, error


def _run(
    copied: nn.Module,
    args: Any,
    kwargs: Any,
    mode: FakeMode | None,
    unnoted: Collection[nn.Module] = (),
    own: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[dict[str, Call], Exception | None]:
    """Run a copy on fake tensors of ``mode``, or on real ones; it keeps the attributes that its forward sets."""
    on_meta = any(tensor.is_meta for tensor in copied.parameters())
    calls: dict[str, Call] = {}

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        if mode is None:
            return tensor.detach().clone()
        return mode.from_tensor(tensor.to("meta") if on_meta else tensor, static_shapes=True)

    outside = Outside.of_call(copied, GlobalNames(type(copied).forward, copied.modules()), {})
    with (
        mode or contextlib.nullcontext(),
        caches_restored(copied),
        rng_restored(),
        _noted_calls(copied, calls, unnoted),
    ):
        given, named = with_tensors((args, kwargs), own or copy_of)
        try:
            copied(*given, **named)
        except Exception as error:  # noqa: BLE001 - raised for calls that were not reached
            return calls, error
        finally:
            torch.clear_autocast_cache()
            if mode is not None or own is not None:  # they may hold tensors without values
                outside.restore()
    return calls, None


def copied_model(model: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """Copy the modules of a model; share objects that cannot be copied, e.g. locks and process groups.

    Args:
        model: any.
        memo: replacements for objects in the copy, by id; None: the same parameters, and copies of the buffers.
    """
    known = dict(memo) if memo is not None else {id(parameter): parameter for parameter in model.parameters()}
    try:
        return copies.deep_copy(model, dict(known))
    except TypeError:
        for module in model.modules():
            for name, value in vars(module).items():
                if name not in TABLES:
                    try:
                        copy.deepcopy(value, dict(known))
                    except TypeError:
                        known[id(value)] = value
        return copies.deep_copy(model, known)


@contextlib.contextmanager
def _noted_calls(model: nn.Module, calls: dict[str, Call], unnoted: Collection[nn.Module] = ()) -> Iterator[None]:
    def note(path: str) -> Callable[..., None]:
        def first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path not in calls:  # a cache among them is filled afterwards: a copy of it
                calls[path] = with_tensors((args, kwargs), lambda tensor: tensor)

        return first

    handles = [
        module.register_forward_pre_hook(note(path), prepend=True, with_kwargs=True)
        for path, module in model.named_modules()
        if module not in unnoted
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
