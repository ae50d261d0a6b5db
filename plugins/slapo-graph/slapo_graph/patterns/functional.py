"""Modules of ``torch.nn`` as function calls, observed by running their forward once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_core.internals import buffers_of, parameters_of
from slapo_graph.leaves import is_changed, is_predefined
from slapo_graph.private import DisableTorchFunction


class INPUT:
    """Placeholder of the module's input."""


@dataclass(frozen=True)
class Own:
    """Placeholder of a parameter or buffer of the module."""

    name: str


@dataclass(frozen=True)
class FunctionalCall:
    """The one call that a module's forward consists of: ``F.linear(INPUT, Own("weight"), Own("bias"))``.

    Args:
        function: of torch.
        args: with placeholders of the input and the module's tensors.
        kwargs: likewise.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the name of the function, e.g. ``"dropout"``."""
        return str(getattr(self.function, "__name__", ""))


def functional_call(module: nn.Module, *, hooked: bool = False) -> FunctionalCall | None:
    """Return the one function call that a ``torch.nn`` module computes, or None.

    That is so for hooks and steps, for batches that are counted, for other padding modes, for weights that are computed
    anew (parametrizations) or renormalized.

    Args:
        module: is called with one tensor.
        hooked: whether to accept a hooked module, and ignore its hooks.
    """
    if not is_predefined(module) or (not hooked and is_changed(module)):
        return None
    if getattr(module, "return_indices", False) or getattr(module, "max_norm", None) is not None:
        return None
    for given in _GIVEN:
        observed = _FirstCall(given, module)
        try:
            with observed:
                out = type(module).forward(module, observed.given)
        except Exception:  # noqa: BLE001 - of another number of axes, or not called with one tensor
            continue
        return observed.call if out is _RESULT else None
    return None


_GIVEN = tuple(torch.empty((0,) * axes) for axes in (2, 3, 4, 5))
"""Batch norms ask how many axes there are."""

_RESULT = torch.empty(0)


class _FirstCall(TorchFunctionMode):
    """Notes the first call of a forward without computing it."""

    def __init__(self, given: torch.Tensor, module: nn.Module) -> None:
        super().__init__()
        self.given = given
        self.call: FunctionalCall | None = None
        self._own = {id(tensor): name for name, tensor in (*buffers_of(module).items(), *parameters_of(module).items())}
        self._own.pop(id(None), None)
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("dim", "size", "__get__"):
            with DisableTorchFunction():  # nor by what records
                return func(*args, **kwargs)
        self._calls += 1
        given = (
            tuple(self._replacement(value) for value in args),
            {key: self._replacement(kwargs[key]) for key in kwargs},
        )
        is_known = not any(isinstance(value, torch.Tensor) for value in (*given[0], *given[1].values()))
        self.call = FunctionalCall(func, *given) if is_known and self._calls == 1 else None
        return _RESULT

    def _replacement(self, value: Any) -> Any:
        if value is self.given:
            return INPUT
        return Own(self._own[id(value)]) if id(value) in self._own else value


def input_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the only argument of a module's call in a list; empty if there are others."""
    if len(args) + len(kwargs) != 1:
        return []
    if args:
        return [args[0]]
    first = list(inspect.signature(type(module).forward).parameters)[1]
    return [kwargs[first]] if first in kwargs else []
