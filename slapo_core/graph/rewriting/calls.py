"""Functions that a rewritten graph calls, under a name that the printed graph shows."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

__all__ = ["NamedCall", "target_for"]


class NamedCall:
    """A function under another name, as the target of a call.

    Args:
        function: what is called.
        name: what the printed graph shows: ``slapo_bias_gelu(x, bias)`` for ``"bias_gelu"``.
        draws: whether it may draw random numbers; None where that is not known, and neither what it writes to.
    """

    def __init__(self, function: Callable[..., Any], name: str, *, draws: bool | None = None) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = name
        self.__module__ = "slapo"
        if draws is not None:
            self.slapo_draws = draws

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedCall) and (other.function, other.__name__) == (self.function, self.__name__)

    def __hash__(self) -> int:
        return hash((self.function, self.__name__))


def target_for(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``function`` as the target of a call: itself where code can name it, else under ``name``."""
    module = getattr(function, "__module__", None) or ""
    own = getattr(function, "__name__", "")
    if module.partition(".")[0] in ("torch", "_operator"):
        return function
    is_named = isinstance(function, FunctionType) and "<" not in function.__qualname__ and own.isidentifier()
    return function if is_named else NamedCall(function, name)
