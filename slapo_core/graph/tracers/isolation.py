"""A recording sees the model, and nothing of what is going on around it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext

__all__ = ["alone"]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Without the torch-function modes of others, who would take the recording for a run of the model."""
    others: list[Any] = []
    while torch._C._len_torch_function_stack():
        others.append(_pop_mode())
    for each in reversed(others):
        if isinstance(each, DeviceContext):  # `with torch.device(...)`: it decides where tensors are made
            _push_mode(each)
    torch.clear_autocast_cache()
    # On top of those of others, torch.utils.checkpoint's for one, which must not count what a recording saves.
    # Emptied in the end: an operation that saves its own result would keep it, and the parameters behind, for ever.
    boxes: list[list[torch.Tensor]] = []
    saved = torch.autograd.graph.saved_tensors_hooks(lambda tensor: _boxed(tensor, boxes), lambda box: box[0])
    try:
        with saved:
            yield
    finally:
        for box in boxes:
            box.clear()
        torch.clear_autocast_cache()  # of weights cast without values
        while torch._C._len_torch_function_stack():
            _pop_mode()
        for each in reversed(others):
            _push_mode(each)


def _boxed(tensor: torch.Tensor, boxes: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    boxes.append([tensor])
    return boxes[-1]
