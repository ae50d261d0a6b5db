"""Memory of the process while a model is partitioned on the CPU: what is freed goes back to the system at once."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

__all__ = ["returned_at_once"]

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_SMALL, _LARGE = 256 * 2**10, 32 * 2**20


@contextlib.contextmanager
def returned_at_once() -> Iterator[None]:
    """Let the C library take memory for tensors from the system, each by itself, and give it back when it is freed.

    Otherwise tensors lie in the heap of the process from the second one of a size on. Each is freed when it has been
    partitioned, small things are put where it lay, and the heap keeps the rest: of a whole model, more than the
    partition. Afterwards the limits are what they become by themselves when large tensors come and go.

    Nothing is done where the C library is another one than glibc, or where the environment sets its limits.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is None or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        yield
        return
    adjust(_MMAP, _SMALL)
    try:
        yield
    finally:
        adjust(_MMAP, _LARGE)
        adjust(_TRIM, 2 * _LARGE)
