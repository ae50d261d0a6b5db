"""A training step trains in training mode."""

from __future__ import annotations

import warnings

from torch import nn

__all__ = ["switch_to_training"]


def switch_to_training(model: nn.Module) -> None:
    """Put a model into training mode that is in evaluation mode as a whole, and say so.

    ``from_pretrained`` gives such models, and ``model.eval()`` between two steps leaves one: without dropout, and with
    the running statistics of batch norms, it would train something else. Where some module is in training mode, the
    modes are somebody's choice (a frozen batch norm), and stay.
    """
    if model.training or any(module.training for module in model.modules()):
        return
    model.train()
    warnings.warn(
        f"{type(model).__name__} was in evaluation mode as a whole (as from_pretrained() gives it, or after .eval()): "
        "a training step puts it into training mode, with dropout; to keep modules as they are in evaluation, call "
        "model.train() and then .eval() on those",
        stacklevel=4,
    )
