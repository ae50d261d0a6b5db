"""Runs torch calls on fake tensors, and hands each of them to the recording."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_core.graph.alike import AlikeCalls
from slapo_core.graph.effects import Observer
from slapo_core.graph.leaves import is_predefined
from slapo_core.graph.pieces import guard_pieces, guard_structure
from slapo_core.graph.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    function_modes,
    set_grad_enabled,
)
from slapo_core.graph.recording import Recording
from slapo_core.graph.regions import Regions
from slapo_core.graph.session import drawn_back
from slapo_core.graph.structure import concrete
from slapo_core.graph.targets import query_of, writes_to_first
from slapo_core.spec.observers import Origin
from slapo_core.spec.tracer import Untraceable

__all__ = ["NeedsValues", "Recorder", "is_recording"]

_SWITCHES = (set_grad_enabled,)
"""Seen through the state that they change."""

_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "__array__", "__bool__", "__complex__", "__contains__", "__dlpack__", "__float__", "__format__", "__index__",
        "__int__", "__repr__", "data_ptr", "item", "numpy", "storage", "tolist", "untyped_storage",
    )
)  # fmt: skip
"""Give values of a tensor that has some, also where a run is on tensors without values."""


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether it is real, or torch has computed it of real ones nevertheless, as it does for one element."""
    return type(tensor) is not FakeTensor or tensor.constant is not None


class NeedsValues(Untraceable):
    """A forward does what a run on tensors without values cannot follow; one on real tensors may."""


class Recorder(TorchFunctionMode):
    """A mode in which every torch call is run and written down.

    Args:
        recording: where to.
        memory_of: gives the fake tensor whose memory stands for that of a real one; None: each has its own.
    """

    def __init__(self, recording: Recording, memory_of: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self._memory_of = memory_of
        self.recording = recording
        self.regions = Regions(recording)
        self.alike: AlikeCalls | None = None
        self._is_paused, self._thread = False, threading.get_ident()
        self._path = ""  # of the module below whose own code runs

    @property
    def is_paused(self) -> bool:
        """Whether what runs now is not written down: inside of a call that is one node, or in another thread."""
        return self._is_paused or threading.get_ident() != self._thread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused or func in _SWITCHES:
            if func in _READS and self.recording.notes is not None and _has_values(args[0]):
                self.recording.notes.value_reads += 1
            return func(*args, **kwargs)
        query = query_of(func)
        if query is not None:
            with self.paused():
                return query(self.recording, func, args, kwargs)
        return self.record_call(func, func, args, kwargs)

    def record_call(self, run: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``run``, and write it down as a call of ``func``.

        One that writes to its first argument gives just that: a fake one may stand for a buffer while it runs.
        """
        if (from_hook := getattr(func, "slapo_from", None)) is not None and (hook := _running_hook()) is not None:
            func = from_hook(Origin(self._path, hook))
        with self.paused():
            guard_pieces(self.recording, func, args, kwargs)
        out = self._record(run, args, kwargs, lambda: self.recording.call(func, args, kwargs))
        if writes_to_first(func) and args and isinstance(args[0], torch.Tensor) and isinstance(out, torch.Tensor):
            return self.recording.know(args[0], self.recording.node(out))
        return out

    def record_module(
        self, path: str, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module below the recorded one, and write it down as one call."""
        is_observed = is_predefined(module)
        alike = None if is_observed else self.alike
        return self._record(
            functools.partial(call, module) if alike is None else functools.partial(alike.call, call, path, module),
            args,
            kwargs,
            lambda: self.recording.call_module(path, args, kwargs),
            may_vary=True,
            is_observed=is_observed,
        )

    def _record(
        self,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        write: Callable[[], Any],
        *,
        may_vary: bool = False,
        is_observed: bool = True,
    ) -> Any:
        self.regions.enter()
        notes = self.recording.notes
        with self.paused():  # asking for a version is a call too
            before = notes.versions((args, kwargs)) if notes is not None else []
        with self.paused(), drawn_back() if may_vary else contextlib.nullcontext():
            observer = Observer(self._memory_of)
            try:
                with observer if is_observed else contextlib.nullcontext():
                    out = run(*concrete(args), **concrete(kwargs))
            except DataDependentOutputException as error:
                raise self._needs_values(f"branches on the values of a tensor ({error.func})") from error
            except DynamicOutputShapeException as error:
                raise self._needs_values(f"makes a tensor whose shape depends on values ({error.func})") from error
            node = write()
            if is_observed:
                node.meta["seen"] = observer.seen(args, kwargs, out)
            if notes is not None:
                with self.paused():
                    written = [self.recording.node(tensor) for tensor, version in before if tensor._version != version]
                notes.note_writes(node, written)
            if may_vary:
                guard_structure(self.recording, out, node)
            return None if out is None else self.recording.give(out, node)

    def _needs_values(self, problem: str) -> NeedsValues:
        refusal = self.recording.refusal(problem)
        return NeedsValues(
            refusal.problem, refusal.location, "give example inputs with values, and a model with values"
        )

    @contextlib.contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """While this lasts, the code of the module at ``path`` runs, and that of its hooks."""
        before, self._path = self._path, path
        try:
            yield
        finally:
            self._path = before

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While this lasts, nothing is written down."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before


def _running_hook() -> Any:
    """The hook of a step, an object that a graph can hold, inside of which this is called; None outside of any."""
    frame, found = sys._getframe(1), None
    while frame is not None and frame.f_code.co_filename != nn.modules.module.__file__:
        first = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        if getattr(type(first), "slapo_is_inlined", False):
            found = first
        frame = frame.f_back  # type: ignore[assignment]
    return found


def is_recording() -> bool:
    """Whether what runs now is written down."""
    return any(isinstance(mode, Recorder) for mode in function_modes())
