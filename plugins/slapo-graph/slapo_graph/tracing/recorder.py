"""The mode that runs torch calls on fake tensors and records each of them."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from slapo_core.internals import is_data_pointer_error, module_calls_through
from slapo_core.observers import Origin
from slapo_graph import autocast_state
from slapo_graph.effects import SideEffectObserver
from slapo_graph.leaves import LeafRule, is_changed, is_predefined
from slapo_graph.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    before_saved_tensors_hooks,
    call_uncompiled,
    custom_functions_through,
    is_compiled,
    set_grad_enabled,
    write_count,
)
from slapo_graph.protocol import Location, Untraceable
from slapo_graph.structure import concrete, tensors_in
from slapo_graph.tracing.diagnostics import model_location, raised_at
from slapo_graph.tracing.given import Given
from slapo_graph.tracing.outside import ACTIVE
from slapo_graph.tracing.queries import query_of
from slapo_graph.tracing.recording import Recording
from slapo_graph.tracing.repeated_calls import RepeatedCalls
from slapo_graph.tracing.session import rng_restored
from slapo_graph.tracing.targets import writes_to_first
from slapo_graph.tracing.writer import module_end

# Guards on the number of chunks of split, chunk and unbind.

_CUT = {"split": "split_size", "chunk": "chunks", "unsafe_split": "split_size", "unsafe_chunk": "chunks", "unbind": ""}


def guard_elements(recording: Recording, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Guard the number of parts into which ``func`` cuts a tensor by its size.

    The guard asks the tensor that is cut; only the recorded code uses its parts.
    """
    name = getattr(func, "__name__", "")
    if name not in _CUT:
        return
    given = dict(zip(("tensor", *filter(None, (_CUT[name],)), "dim"), args, strict=False)) | dict(kwargs)
    tensor = given.get("tensor", given.get("input", given.get("self")))
    if not isinstance(tensor, torch.Tensor):
        return
    by = given.get(_CUT[name], given.get("split_size_or_sections"))
    if isinstance(by, tuple | list):
        return  # given one by one
    dim = int(concrete(given.get("dim", 0)))
    length = recording.length(tensor, dim)
    if name.endswith("chunk"):
        by = -(-length // by)
        if int(concrete(length)) == 0:
            by = 1
    chunks = length if name == "unbind" else -(-length // by)
    recording.guard(getattr(chunks.node, "node", None), int(concrete(chunks)))


# Autograd that torch-function modes do not see: custom functions, and hooks on saved tensors.

_CHECKPOINTING = (
    "checkpoints activations (torch.utils.checkpoint), which its graph would not do",
    "disable it in the model (transformers: model.gradient_checkpointing_disable()) and checkpoint by "
    "sch['a.b'].checkpoint(); or trace and cut so that it lies inside of a module that stays a call",
)


class ApplyFunction:
    """``function.apply`` as one call in a graph, with its author's backward.

    Args:
        function: the custom autograd function.
    """

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = f"{function.__name__}_apply"
        self.__module__ = function.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ApplyFunction) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)


def autograd_functions(recorder: Recorder) -> AbstractContextManager[None]:
    """Record each call of a custom ``torch.autograd.Function`` as one call.

    Recording the operations of its forward would lose its backward.
    """

    def call(cls: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if recorder.is_paused:
            return run(*args, **kwargs)
        if cls is CheckpointFunction:  # use_reentrant=True
            raise recorder.recording.refusal(*_CHECKPOINTING)
        return recorder.record_call(run, ApplyFunction(cls), args, kwargs)

    return custom_functions_through(call)


def checkpointing_refused(recorder: Recorder) -> AbstractContextManager[None]:
    """Refuse recorded code that checkpoints activations, which the graph would keep.

    Raises:
        Untraceable: it entered ``saved_tensors_hooks``, as ``torch.utils.checkpoint`` and ``save_on_cpu`` do.
    """

    def refuse() -> None:
        if not recorder.is_paused and torch.is_grad_enabled():
            raise recorder.recording.refusal(*_CHECKPOINTING)

    return before_saved_tensors_hooks(refuse)


# Calls of modules below the recorded one: one call in the graph, or inlined.


def module_calls(recorder: Recorder, root: nn.Module, leaves: LeafRule) -> AbstractContextManager[None]:
    """Record a call of a leaf below the recorded module as one call."""
    recording = recorder.recording

    def call(run: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiled(module):  # as without module.compile(): compilers want tensors with values
            run = functools.partial(call_uncompiled, run)
        if recorder.is_paused:
            return run(module, *args, **kwargs)
        path = recording.modules.get(id(module))
        if path == "":
            if recorder.is_in_root:
                raise recording.refusal("calls itself")
            recorder.is_in_root = True  # the recorded function is the module's own call
            return run(module, *args, **kwargs)
        if path is None and any(True for _ in module.parameters()):
            raise recording.refusal(
                f"calls a {type(module).__name__} outside the traced module",
                "trace the module that holds both",
            )
        if path is None:
            return run(module, *args, **kwargs)
        if not leaves(module, path):
            begin = next(iter(reversed(recording.graph.nodes)), None)
            with recorder.inside(path):
                out = run(module, *args, **kwargs)
            if is_predefined(module):
                recording.note_inlined(path, args, kwargs, out, begin)
            if recording.notes is not None:
                recording.compute(module_end, (path,))
            return out
        return recorder.record_module(path, run, module, args, kwargs)

    return module_calls_through(call, root)


class Regions:
    """Write a switch of gradients and autocast into the graph before a call in another state."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.now = self.entry = autocast_state.state()

    def enter(self) -> None:
        """Switch to the present state, before a call is written."""
        self._switch(autocast_state.state())

    def finish(self) -> None:
        """Switch back to the state of the beginning, at the end."""
        self._switch(self.entry)

    def _switch(self, state: autocast_state.State) -> None:
        if self.now != state:
            self.now = state
            self.recording.compute(autocast_state.set_state, state)


_SWITCHES = (set_grad_enabled,)
"""Not recorded as calls: :class:`Regions` records the resulting state."""

_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "__array__", "__bool__", "__complex__", "__contains__", "__dlpack__", "__float__", "__format__", "__index__",
        "__int__", "__repr__", "data_ptr", "item", "numpy", "storage", "tolist", "untyped_storage",
    )
)  # fmt: skip
"""Return values of real tensors, in runs on fake tensors too."""


def _has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is real, or a fake one whose value torch computed."""
    return type(tensor) is not FakeTensor or tensor.constant is not None


_CUSTOM_OPERATOR = (
    "make the kernel a custom operator with a fake implementation (torch.library.custom_op, register_fake)"
)


class NeedsValues(Untraceable):
    """Signal a forward that needs values of tensors; it may be recorded on real ones."""


class Recorder(TorchFunctionMode):
    """Run and record every torch call.

    Args:
        recording: of the calls.
        memory_of: returns the fake tensor that represents the memory of a real one; None: each represents its own.
    """

    slapo_is_recorder = True  # slapo_core.observers: is_recording

    def __init__(self, recording: Recording, memory_of: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self._memory_of = memory_of
        self.recording = recording
        self.regions = Regions(recording)
        self.repeated_calls: RepeatedCalls | None = None
        self.is_in_root = True
        self.given: Given | None = None  # of the call that runs now
        self._is_paused, self._thread = False, threading.get_ident()
        self._path = ""  # of the module whose code runs

    @property
    def is_paused(self) -> bool:
        """Return whether nothing is recorded now: inside of a call that is one node, or in another thread."""
        return self._is_paused or threading.get_ident() != self._thread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused or func in _SWITCHES:
            if func in _READS and self.recording.notes is not None and _has_values(args[0]):
                self.recording.notes.value_reads += 1
            return func(*args, **kwargs)
        if func is torch.Tensor.data_ptr:
            raise self._refused_pointer(model_location())
        query = query_of(func)
        if query is not None:
            with self.paused():
                return query(self.recording, func, args, kwargs)
        return self.record_call(func, func, args, kwargs)

    def record_call(self, run: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``run``, and record it as a call of ``func``.

        A call that writes to its first argument returns that very object: a fake tensor may represent a buffer during
        the run.
        """
        if (from_hook := getattr(func, "slapo_from", None)) is not None and (hook := _running_hook()) is not None:
            func = from_hook(Origin(self._path, hook))
        with self.paused():
            guard_elements(self.recording, func, args, kwargs)
        caller = getattr(func, "__name__", "")
        write = functools.partial(self.recording.call, func, args, kwargs)
        out = self._record(run, args, kwargs, write, caller=caller, may_change=isinstance(func, ApplyFunction))
        if writes_to_first(func) and args and isinstance(args[0], torch.Tensor) and isinstance(out, torch.Tensor):
            return self.recording.register(args[0], self.recording.node(out))
        return out

    def record_module(
        self, path: str, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module below the recorded one, and record it as one call."""
        is_observed = is_predefined(module)
        run = functools.partial(call, module)
        if self.repeated_calls is not None and not is_observed:
            run = functools.partial(self._call_or_repeat, self.repeated_calls, call, path, module)
        return self._record(
            run,
            args,
            kwargs,
            lambda: self.recording.call_module(path, args, kwargs),
            caller=f"module '{path}'",
            may_vary=True,
            is_observed=is_observed,
            may_change=not is_observed or is_changed(module),
        )

    def _call_or_repeat(self, repeated: RepeatedCalls, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self.given is not None
        if self.given.has_variables:  # which the call may read and fill
            return call(*args[1:], **kwargs)
        return repeated.call(call, *args, **kwargs)

    def _record(
        self,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        write: Callable[[], Any],
        *,
        caller: str,
        may_vary: bool = False,
        is_observed: bool = True,
        may_change: bool = False,
    ) -> Any:
        self.regions.enter()
        notes = self.recording.notes
        with self.paused():  # reading a version is a call too
            before = [(one, write_count(one)) for one in tensors_in((args, kwargs))] if notes is not None else []
        given = Given(self.recording, args, kwargs) if may_vary else None
        self.given = given
        outside = ACTIVE.get() if may_change else None
        with (
            self.paused(),
            rng_restored() if may_vary else contextlib.nullcontext(),
            outside.elsewhere() if outside is not None else contextlib.nullcontext(),
        ):
            observer = SideEffectObserver(self._memory_of)
            try:
                with observer if is_observed else contextlib.nullcontext():
                    if given is None:
                        out = run(*concrete(args), **concrete(kwargs))
                    else:
                        out = run(*given.args, **given.kwargs)
            except DataDependentOutputException as error:
                raise self._needs_values(f"branches on the values of a tensor ({error.func})") from error
            except DynamicOutputShapeException as error:
                raise self._needs_values(f"makes a tensor whose shape depends on values ({error.func})") from error
            except RuntimeError as error:
                if not is_data_pointer_error(error):
                    raise
                raise NeedsValues(
                    f"calls {caller}, which uses the data pointer of a tensor",
                    raised_at(error) or model_location(),
                    f"give example inputs with values, and a model with values; or {_CUSTOM_OPERATOR}",
                ) from error
            changed = given if given is not None and given.is_changed() else None
            if changed is not None:
                changed.before_call(out)
            node = write()
            if is_observed:
                node.meta["side_effects"] = observer.side_effects(args, kwargs, out)
            if notes is not None:
                with self.paused():
                    written = [self.recording.node(one) for one, version in before if write_count(one) != version]
                notes.note_writes(node, written)
            if may_vary:
                self.recording.guard_structure(out, node)
            out = None if out is None else self.recording.give(out, node)
            if changed is not None:
                changed.after_call(node)
            return out

    def _needs_values(self, problem: str) -> NeedsValues:
        refusal = self.recording.refusal(problem)
        return NeedsValues(
            refusal.problem, refusal.location, "give example inputs with values, and a model with values"
        )

    def _refused_pointer(self, location: Location | None) -> Untraceable:
        where = f" in module '{self._path}'" if self._path else ""
        keep = (
            f"keep that module a call, leaves='{self._path}'" if self._path else "move it to a module that stays a call"
        )
        return Untraceable(f"uses the data pointer of a tensor{where}", location, f"{keep}; or {_CUSTOM_OPERATOR}")

    @contextlib.contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Set the path of the running module, or of its hooks, for messages.

        Raises:
            Untraceable: it used the data pointer of a tensor, e.g. to launch a kernel.
        """
        before, self._path = self._path, path
        try:
            yield
        except RuntimeError as error:
            if not is_data_pointer_error(error):
                raise
            raise self._refused_pointer(raised_at(error)) from error
        finally:
            self._path = before

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause recording while the block runs."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before


def _running_hook() -> Any:
    """Return the running hook that a graph can hold; None outside of any."""
    frame, found = sys._getframe(1), None
    while frame is not None and frame.f_code.co_filename != nn.modules.module.__file__:
        first = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        if getattr(type(first), "slapo_is_inlined", False):
            found = first
        frame = frame.f_back  # type: ignore[assignment]
    return found
