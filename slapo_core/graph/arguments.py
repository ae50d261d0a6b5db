"""The arguments of a call: bound to the forward's parameters, and what of them a graph holds for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from slapo_core.graph.structure import children, is_plain

__all__ = ["MISSING", "Parameters", "form", "forms"]


class MISSING:
    """In place of an argument that was not given."""


class Parameters:
    """The parameters of a forward, without the module itself.

    Args:
        forward: takes the module first.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.signature = inspect.signature(forward)
        self.itself, *names = self.signature.parameters
        self.names = tuple(names)
        kinds = {self.signature.parameters[name].kind for name in names}
        self._is_simple = kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}

    def bind(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """One value for each parameter, in their order; :class:`MISSING` for one that was left out.

        Raises:
            TypeError: as a call of the forward would.
        """
        if self._is_simple and len(args) + len(kwargs) <= len(self.names):
            rest = self.names[len(args) :]
            if kwargs.keys() <= set(rest):
                return (*args, *(kwargs.get(name, MISSING) for name in rest))
        bound = self.signature.bind(module, *args, **kwargs).arguments
        return tuple(bound.get(name, MISSING) for name in self.names)


def form(value: Any) -> Any:
    """What a recording takes for granted of an argument: hashable, and equal for calls that one recording is valid for.

    The type, number of axes and device of tensors; the kind of numbers, not their size; what is text, true, false or
    None; the shape of containers.
    """
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, value.dtype, value.dim(), value.device.type)
    cls = type(value)
    if cls is int or cls is float or value is MISSING:
        return cls if value is not MISSING else MISSING
    parts = children(value)
    if parts is not None:
        return (cls, tuple((key, form(part)) for _, key, part in parts))
    return (cls, value) if is_plain(value) and not isinstance(value, slice) else cls


def forms(values: tuple[Any, ...]) -> Any:
    """The forms of all arguments of a call, and which of their tensors are one and the same: ``f(x, x)``."""
    tensors: list[int] = []
    _collect(values, tensors)
    if len(set(tensors)) == len(tensors):
        return tuple(map(form, values)), None
    return tuple(map(form, values)), tuple(map(tensors.index, tensors))


def _collect(values: Any, tensors: list[int]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(id(value))
        else:
            parts = children(value)
            if parts is not None:
                _collect([part for _, _, part in parts], tensors)
