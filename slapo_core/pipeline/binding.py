"""From a batch to the arguments of the model's forward, by parameter: what the stages of a pipeline read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from slapo_core.errors import ArgumentError

__all__ = ["bound_batch", "bound_call"]


def bound_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``model(*args, **kwargs)`` by parameter, in the order of the parameters.

    Those that are left out are missing. ``*args`` is a tuple under its parameter's name, ``**kwargs`` a dictionary
    under its own: missing too where there is nothing in them.

    Raises:
        ArgumentError: the forward does not take them.
    """
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(
            f"the forward of {type(model).__name__} does not take this batch: {error}",
            hint="a mapping gives keyword arguments, a tuple positional ones, anything else is one argument",
        ) from None
    return dict(bound.arguments)


def bound_batch(model: nn.Module, batch: Any, *, for_loss: bool = False) -> dict[str, Any]:
    """The arguments of the model's forward that a batch holds, as ``train_step`` gives them to the model.

    Args:
        model: whose forward it is.
        batch: a mapping (keyword arguments), a tuple or list (positional ones), or one argument.
        for_loss: whether a batch may hold more than the forward takes, because a ``loss(output, batch)`` reads it.

    Raises:
        ArgumentError: the forward does not take it.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    if isinstance(batch, Mapping):
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        takes_all = not for_loss or any(p.kind is p.VAR_KEYWORD for p in parameters)
        return bound_call(model, (), {name: value for name, value in batch.items() if takes_all or name in names})
    if isinstance(batch, (tuple, list)):
        count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        takes_all = not for_loss or any(p.kind is p.VAR_POSITIONAL for p in parameters)
        return bound_call(model, tuple(batch) if takes_all else tuple(batch[:count]), {})
    return bound_call(model, (batch,), {})
