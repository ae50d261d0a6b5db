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
    saved = torch.autograd.graph.saved_tensors_hooks(_itself, _itself)
    try:
        with saved:
            yield
    finally:
        torch.clear_autocast_cache()  # of weights cast without values
        while torch._C._len_torch_function_stack():
            _pop_mode()
        for each in reversed(others):
            _push_mode(each)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
