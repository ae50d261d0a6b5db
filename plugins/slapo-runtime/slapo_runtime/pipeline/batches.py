"""Batches: their arguments by parameter, their input signature, and the modes of modules."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slapo_core.errors import ArgumentError
from slapo_core.private import pytree

# From a batch to the arguments of the model's forward, by parameter: what the stages of a pipeline read.


def bound_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``model(*args, **kwargs)`` by parameter.

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
    """Return a batch's arguments of the model's forward, by parameter.

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


# `InputSignature`: for which calls stages are the same.

_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None), torch.dtype, torch.device, torch.Size)


class InputSignature:
    """Compare batches and modes for which stages are the same.

    Two are equal if their arguments have the same names, structure and plain values, their tensors the same shape,
    type, device and need of a gradient, the same ones of them are one object, and every module is in the same mode.

    Args:
        inputs: the arguments of the model's forward, by parameter.
        modes: of the modules, in their order.
    """

    def __init__(self, inputs: Mapping[str, Any], modes: Sequence[bool]) -> None:
        leaves, self._structure = pytree.tree_flatten(dict(inputs))
        first = {id(leaf): number for number, leaf in reversed(list(enumerate(leaves)))}
        self._leaves = [_tensor(leaf, first) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._modes = list(modes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InputSignature):
            return NotImplemented
        if (self._structure, self._modes) != (other._structure, other._modes):
            return False
        return all(map(_is_same, self._leaves, other._leaves))

    @property
    def is_plain(self) -> bool:
        """Return whether all arguments are tensors and plain values."""
        return all(type(leaf) in _PLAIN for leaf in self._leaves)

    __hash__ = None  # type: ignore[assignment]


def _tensor(tensor: torch.Tensor, first: Mapping[int, int]) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, first[id(tensor)])


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and type(one) in _PLAIN and bool(one == other)


# The mode in which stages are asked for.


@contextlib.contextmanager
def in_mode(modules: Sequence[nn.Module], *, training: bool) -> Iterator[None]:
    """Set training or evaluation mode; restore the mode of every module.

    As ``train_step`` does it: where some module is in training mode, the modes stay as chosen.
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
