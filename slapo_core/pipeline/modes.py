"""The mode in which stages are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

__all__ = ["in_mode"]


@contextlib.contextmanager
def in_mode(modules: Sequence[nn.Module], *, training: bool) -> Iterator[None]:
    """Let a model be in the mode of a training step, or of an evaluation; the mode of every module comes back.

    As ``train_step`` does it: where some module is in training mode, the modes are somebody's choice.
    """
    modes = [module.training for module in modules]
    changed = (
        [module for module in modules if module.training is not training] if not training or not any(modes) else []
    )
    for module in changed:
        module.training = training
    try:
        yield
    finally:
        for module in changed:
            module.training = not training
