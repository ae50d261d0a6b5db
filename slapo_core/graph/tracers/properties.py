"""What torch.export takes for granted of a tensor and does not guard."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch.overrides import TorchFunctionMode

from slapo_core.graph.location import is_of_the_model
from slapo_core.graph.recording import Recording

__all__ = ["properties_refused"]

_PROPERTIES = ("requires_grad", "is_leaf", "grad", "grad_fn", "_base")
_METHODS = ("is_contiguous", "stride", "storage_offset", "data_ptr", "untyped_storage", "retain_grad", "register_hook")


@contextlib.contextmanager
def properties_refused(recording: Recording) -> Iterator[None]:
    """While this lasts, model code that asks a tensor for one of these is refused."""
    with _Refusing(recording):
        yield


class _Refusing(TorchFunctionMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)
        asked = getattr(owner, "__name__", "") if name == "__get__" else name
        if asked in (_PROPERTIES if name == "__get__" else _METHODS) and _is_asked_by_the_model():
            raise self.recording.refusal(f"asks for .{asked} of a tensor, which torch.export does not hold to")
        return func(*args, **(kwargs or {}))


def _is_asked_by_the_model() -> bool:
    """Whether the call was written in the model; other modes, which pass it on, lie between."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return is_of_the_model(frame.f_code.co_filename)
