"""What autograd does that torch-function modes do not see: custom functions, and hooks on what is saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

if TYPE_CHECKING:
    from slapo_core.graph.recorder import Recorder

__all__ = ["ApplyFunction", "autograd_functions", "checkpointing_refused"]

_CHECKPOINTING = (
    "checkpoints activations (torch.utils.checkpoint), which its graph would not do",
    "take it out of the model's code (transformers: model.gradient_checkpointing_disable()) and call "
    "sch['a.b'].checkpoint() of what it is to cover; or trace and cut where it lies inside of a module that stays a "
    "call",
)


class ApplyFunction:
    """``function.apply`` as a target of a graph: one call, with the backward that its author wrote.

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


@contextlib.contextmanager
def autograd_functions(recorder: Recorder) -> Iterator[None]:
    """While this lasts, a call of a custom ``torch.autograd.Function`` is one call in the graph.

    What its forward computes would be seen, but without its backward.
    """
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call = original.__get__(None, cls)
        if recorder.is_paused:
            return call(*args, **kwargs)
        if cls is CheckpointFunction:  # use_reentrant=True
            raise recorder.recording.refusal(*_CHECKPOINTING)
        return recorder.record_call(call, ApplyFunction(cls), args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment, unused-ignore]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


@contextlib.contextmanager
def checkpointing_refused(recorder: Recorder) -> Iterator[None]:
    """While this lasts, recorded code that checkpoints activations is refused: the graph would keep them.

    Raises:
        Untraceable: it entered ``saved_tensors_hooks``, as ``torch.utils.checkpoint`` and ``save_on_cpu`` do.
    """
    enter = saved_tensors_hooks.__enter__

    def entered(hooks: saved_tensors_hooks) -> None:
        if not recorder.is_paused and torch.is_grad_enabled():
            raise recorder.recording.refusal(*_CHECKPOINTING)
        enter(hooks)

    saved_tensors_hooks.__enter__ = entered  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
