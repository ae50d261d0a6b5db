"""Torch functions as targets of calls in a graph."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.graph import inplace_methods, magic_methods, reflectable_magic_methods

from slapo_graph.private import TensorBase

_REFLECTED = {
    f"__r{name.strip('_')}__": getattr(operator, name, operator.truediv) for name in reflectable_magic_methods
}
_OPERATORS: dict[str, Any] = {
    f"__{name.strip('_')}__": getattr(operator, name, operator.truediv)
    for name in (*magic_methods, *inplace_methods, "abs", "setitem")
}
_OPERATORS.update(_REFLECTED, __idiv__=operator.itruediv)
"""Python's operators by the names of tensors' methods."""

_WRAPPED = {
    func: name for name in _OPERATORS if isinstance(func := getattr(torch.Tensor, name, None), types.FunctionType)
}
"""Operators that torch writes in Python, some of them (``**``) under the name of what they call."""


def target_of(func: Any, refuse: Callable[[str], Exception]) -> tuple[str, Any, tuple[int, ...] | None]:
    """Return how a graph calls a torch function.

    Args:
        func: of a torch-function mode.
        refuse: makes the error for a function that no graph can call.

    Returns:
        ``"function"``, ``"method"`` or ``"attribute"``; the target; the order of its operands, or None.
    """
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", None) == "__get__" and owner is not None:
        return "attribute", attribute_of(owner), None
    name = _name(func)
    if name == "__set__":
        raise refuse(f"sets .{attribute_of(owner)} of a tensor")
    if name in _OPERATORS and is_method(func, name):
        return "function", _OPERATORS[name], (1, 0) if name in _REFLECTED else None
    if is_method(func, name):
        return "method", name, None
    return "function", func, None


def writes_to_first(func: Any) -> bool:
    """Return whether a function writes its first argument in place: ``add_``, ``+=``."""
    name = _name(func)
    if name.startswith("__"):
        return name in _OPERATORS and name.startswith("__i") and name != "__invert__"
    return bool(name.endswith("_")) and is_method(func, name)


def _name(func: Any) -> str:
    """Return the name of the tensor method behind a torch function, or its own name."""
    name = str(getattr(func, "__name__", ""))
    return name if is_method(func, name) or not isinstance(func, types.FunctionType) else _WRAPPED.get(func, name)


def attribute_of(descriptor: Any) -> str:
    """Return the attribute of a getter or setter."""
    named: Any = descriptor.fget if isinstance(descriptor, property) else descriptor
    return str(named.__name__)


def is_method(func: Any, name: str) -> bool:
    """Return whether a torch function is the method of this name of tensors."""
    return getattr(torch.Tensor, name, None) is func or getattr(TensorBase, name, None) is func
