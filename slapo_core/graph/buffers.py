"""A recording is no step of the training: what it writes to buffers is taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["buffers_kept"]


@contextlib.contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Put back, at the end, what was written to buffers meanwhile.

    Also where the run is fake: torch computes with small tensors for real there, to know their values.
    """
    before = [(buffer, buffer._version, buffer.detach().clone()) for buffer in module.buffers() if not buffer.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, value in before:
                if buffer._version != version:
                    buffer.copy_(value)
