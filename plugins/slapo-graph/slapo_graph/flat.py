"""Flat recordings of a module, for plugins that partition its graph.

:func:`flat` records a module, by a rule of which modules below stay calls, with values and writes of every node.
:func:`graph_function` compiles a graph built of its nodes to a function. The graph checks its assumptions by calls of
``check``; run :meth:`FlatGraph.require` before it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from slapo_core.errors import GuardError
from slapo_core.internals import buffers_of, forwards, module_index
from slapo_core.observers import PATCHING, spans_stages
from slapo_graph.autocast_state import State, set_state, state
from slapo_graph.example_calls import copied_model
from slapo_graph.guards import BoundChecks, Checks, describe, fingerprint
from slapo_graph.leaves import inlined_modules
from slapo_graph.private import write_count
from slapo_graph.protocol import Flag, Guard, GuardViolation, Location, Recorded, check
from slapo_graph.specialization import graph_function
from slapo_graph.structure import Opaque, children, concrete, is_plain, rebuild, tensors_in
from slapo_graph.tracing.diagnostics import refusal
from slapo_graph.tracing.fake import FakeMode
from slapo_graph.tracing.given import MakeDefaultDict, contents_after, sets_variables
from slapo_graph.tracing.outside import refusing_changes
from slapo_graph.tracing.reads import GlobalNames
from slapo_graph.tracing.session import buffers_restored
from slapo_graph.tracing.tracer import RecordTracer, after_first_call, recorded
from slapo_graph.tracing.writer import Notes, empty_graph, module_end, placeholder
from slapo_graph.variants import RecordedForward

__all__ = [
    "FakeMode",
    "FlatGraph",
    "GuardViolation",
    "MakeDefaultDict",
    "Opaque",
    "State",
    "check",
    "children",
    "concrete",
    "contents_after",
    "copied_model",
    "empty_graph",
    "flat",
    "graph_function",
    "is_merely_spanned",
    "is_merely_traced",
    "is_plain",
    "module_end",
    "placeholder",
    "rebuild",
    "set_state",
    "sets_variables",
    "state",
]

_HINT = "recreate the stages after such a change"


class FlatGraph:
    """Hold the recorded graph of a module.

    Attributes:
        module: the recorded one.
        graph: its placeholders are the captured tensors, and then the arguments that were given. ``module_end(path)``
            stands where a call of an inlined module ended.
        captured: tensors from elsewhere, which the graph holds itself.
        guards: by number in the calls of ``check``; :meth:`guard` adds one.
        values: known values of nodes: tensors (mostly fake), numbers, containers, ``Opaque``.
        writes: by node, the arguments that it changes in place.
        storages: by node, a number of its tensor's storage; nodes that share memory have equal ones.
        written: names of buffers that the run wrote to.
        inlined: the modules whose own code is part of the graph, by path.
        state: of gradients and autocast, outside of the recording.
        needs_values: the error on fake tensors, if the recording needed real ones.
    """

    def __init__(
        self,
        module: nn.Module,
        recorded: Recorded,
        notes: Notes,
        *,
        surroundings: tuple[Flag, ...],
        written: frozenset[str],
        inlined: Mapping[str, nn.Module],
        meta_device: torch.device | None = None,
    ) -> None:
        self.module, self.graph, self.captured = module, recorded.graph, recorded.captured
        self.guards = list(recorded.guards)
        self.values, self.writes, self.storages = notes.values, notes.writes, notes.storages
        self.written, self.inlined, self.state = written, dict(inlined), state()
        index = {path: number for number, path in enumerate(self.inlined)}
        self._owners = list(self.inlined.values())
        self._tensors = list(_read_tensors(module, self.graph))
        self._checks = Checks((*recorded.flags, *surroundings), index)
        self._bound: BoundChecks | None = None  # of the last call
        self._default = torch.get_default_dtype()
        self._meta_device = meta_device
        self._reads_values = notes.needs_values is not None or bool(notes.value_reads)
        self.needs_values = None if notes.needs_values is None else refusal(notes.needs_values, RecordTracer(), "")

    def of_copy(self, module: nn.Module) -> FlatGraph | None:
        """Bind the graph to a copy of the module, by names.

        None if the recording read values of tensors, or would differ on the copy.
        """
        if self._reads_values:
            return None
        other = copy.copy(self)
        other._bound = None
        other.module, other.inlined = module, {path: module.get_submodule(path) for path in self.inlined}
        other._owners = list(other.inlined.values())
        other._tensors = list(_read_tensors(module, self.graph))
        if [each[1:] for each in other._tensors] != [each[1:] for each in self._tensors]:
            return None
        return other if other._checks.violated(other._owners) is None else None

    def device(self, node: fx.Node) -> torch.device:
        """Return the device of a node's tensor; for the meta device, the device it represents."""
        device: torch.device = self.values[node].device
        return self._meta_device if device.type == "meta" and self._meta_device is not None else device

    def forget(self) -> None:
        """Drop the tensors of the run."""
        self.values, self.storages = {}, {}

    def require(self, setting: State) -> None:
        """Require the recorded attributes, global names, autocast and shapes.

        Args:
            setting: what :func:`state` gives now.

        Raises:
            GuardError: an attribute, a global name, autocast or the default dtype is another; a parameter or buffer
                that the recorded code reads is of another shape or dtype.
        """
        if self._bound is None or not self._bound.hold(self.module):
            violated = self._checks.violated(self._owners)
            if violated is not None:
                flag, found = violated
                was, is_now = describe(flag.expected), describe(fingerprint(found))
                raise GuardError(f"recorded with {flag.name} == {was}, and now it is {is_now}", hint=_HINT)
            self._bound = self._checks.bound(self._owners)
        for owner, name, shape, dtype in self._tensors:
            found = getattr(owner, name)
            if found.shape != shape or found.dtype != dtype:
                was, now = f"{tuple(shape)} and {dtype}", f"{tuple(found.shape)} and {found.dtype}"
                raise GuardError(f"recorded with '{name}' of shape {was}, and now it is of shape {now}", hint=_HINT)
        if setting[1:] != self.state[1:]:
            raise GuardError("recorded under another autocast setting", hint=_HINT)
        if torch.get_default_dtype() != self._default:
            raise GuardError(f"recorded with the default dtype {self._default}", hint=_HINT)

    def guard(self, value: str, expected: Any, location: Location | None) -> int:
        """Add a guard; return its number for a call of ``check``.

        Args:
            value: the checked expression, for the message.
            expected: what it must be.
            location: of the model.
        """
        self.guards.append(Guard(value, expected, location or ("<unknown>", 0)))
        return len(self.guards) - 1

    def violated(self, violation: GuardViolation) -> GuardError:
        """Return the error for a violated guard."""
        guard = self.guards[violation.index]
        return GuardError(
            f"recorded with {guard.value} == {guard.expected!r}, and this call has {violation.found!r}",
            location=guard.location,
            hint="the model decides there what to compute: create the stages with a batch like this one",
        )


def _read_tensors(module: nn.Module, graph: fx.Graph) -> Iterator[tuple[nn.Module, str, torch.Size, torch.dtype]]:
    for path in dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr"):
        above, _, name = path.rpartition(".")
        owner: Any = module
        for part in above.split(".") if above else ():
            owner = getattr(owner, part)
        tensor = getattr(owner, name)
        if isinstance(tensor, torch.Tensor):
            yield owner, name, tensor.shape, tensor.dtype


def flat(
    module: nn.Module,
    forward: Callable[..., Any],
    arguments: Mapping[str, Any],
    leaves: Callable[[nn.Module, str], bool],
    *,
    path: str = "",
) -> FlatGraph:
    """Record a module with its own rule of what stays a call.

    Args:
        module: the module.
        forward: takes the module first.
        arguments: by parameter of the forward, without omitted ones; tensors may be fake.
        leaves: whether a module below, at its path, stays a call.
        path: of the module, for messages.

    Raises:
        TraceError: it cannot be recorded.
    """
    inlined = inlined_modules(module, leaves)
    buffers = [
        (f"{path}.{name}" if path else name, buffer)
        for path, below in module_index.walk(module)
        for name, buffer in buffers_of(below).items()
        if buffer is not None
    ]
    versions = [(name, buffer, write_count(buffer)) for name, buffer in buffers]
    with PATCHING:
        names = GlobalNames(forward, inlined.values())
        try:
            with names.restored(), buffers_restored(module), _by_own_forwards(inlined.values()):
                own, meta_device = refusing_changes(forward, names), _device(module, arguments)
                graph, notes = after_first_call(
                    lambda: recorded(module, own, arguments, leaves, noted=True, meta_device=meta_device)
                )
                written = frozenset(name for name, buffer, version in versions if write_count(buffer) != version)
        except Exception as error:
            raise refusal(error, RecordTracer(), path) from error
    return FlatGraph(
        module,
        graph,
        notes,
        surroundings=names.flags,
        written=written,
        inlined=inlined,
        meta_device=meta_device,
    )


def _device(module: nn.Module, arguments: Mapping[str, Any]) -> torch.device | None:
    """Return the device that meta tensors represent; None without meta tensors."""
    tensors = [*tensors_in(dict(arguments)), *module.parameters(), *module.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return None
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))


def is_merely_traced(module: nn.Module) -> bool:
    """Return whether a module's forward is just its own recorded graph."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, forwards.ModuleForward) or forward.has_own:
        return False
    if not all(map(spans_stages, forward.wrappers)):
        return False
    graph = getattr(forward.base, "__func__", None)
    return isinstance(graph, RecordedForward) and not graph.is_rewritten


def is_merely_spanned(module: nn.Module) -> bool:
    """Return whether a module runs its class's forward, within wrappers that may span stages."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, forwards.ModuleForward) or forward.has_own or forward.base is not None:
        return False
    return all(map(spans_stages, forward.wrappers))


@contextlib.contextmanager
def _by_own_forwards(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let merely traced modules run their own forward."""
    before = [(module, dict(module.__dict__)) for module in modules if is_merely_traced(module)]
    for module, _ in before:
        del module.__dict__["forward"]
    try:
        yield
    finally:
        for module, own in before:  # in their order
            module.__dict__.clear()
            module.__dict__.update(own)
