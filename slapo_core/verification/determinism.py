"""The fixed conditions of a run: known seeds, backward in this thread, the caller's state put back."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from slapo_core.spec.accelerators import fork_rng
from slapo_core.verification.dropout import DropoutMode

__all__ = ["fixed_conditions"]


@contextlib.contextmanager
def fixed_conditions(seed: int, dropout: DropoutMode | None = None) -> Iterator[None]:
    """Run the block reproducibly, and leave every random number generator as it was.

    Backward runs in the calling thread, where the mode that switches dropout off holds, so that a forward that
    activation checkpointing recomputes is computed like the first time.

    Args:
        seed: for torch's, Python's and, where it is imported, numpy's global generator.
        dropout: decides whether it is off, and keeps what it draws; None: off.
    """
    python_state = random.getstate()
    numpy_random: Any = sys.modules.get("numpy.random")
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    try:
        with fork_rng(), torch.autograd.set_multithreading_enabled(False), dropout or DropoutMode():
            torch.manual_seed(seed)
            random.seed(seed)
            if numpy_random is not None:
                numpy_random.seed(seed)
            yield
    finally:
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
