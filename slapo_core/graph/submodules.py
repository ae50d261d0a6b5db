"""Calls of modules below the recorded one: one call in the graph, or looked into."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core.graph.leaves import LeafRule
from slapo_core.graph.notes import left

if TYPE_CHECKING:
    from slapo_core.graph.recorder import Recorder

__all__ = ["module_calls"]


@contextlib.contextmanager
def module_calls(recorder: Recorder, leaves: LeafRule) -> Iterator[None]:
    """While this lasts, a call of a leaf below the recorded module is written down, and not what it does."""
    called, thread = nn.Module.__call__, threading.get_ident()
    recording = recorder.recording

    def original(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call it; one under ``module.compile()`` as it would be without: compilers want tensors with values."""
        if module._compiled_call_impl is not None and threading.get_ident() == thread:
            return module._call_impl(*args, **kwargs)
        return called(module, *args, **kwargs)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if recorder.is_paused:
            return original(module, *args, **kwargs)
        path = recording.modules.get(id(module))
        if path == "":
            raise recording.refusal("calls itself")
        if path is None and any(True for _ in module.parameters()):
            raise recording.refusal(
                f"calls a {type(module).__name__} that lies outside of the traced module",
                "trace the module that holds both",
            )
        if path is None:
            return original(module, *args, **kwargs)
        if not leaves(module, path):
            with recorder.inside(path):
                out = original(module, *args, **kwargs)
            if recording.notes is not None:
                recording.compute(left, (path,))
            return out
        return recorder.record_module(path, original, module, args, kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = called  # type: ignore[method-assign]
