"""Custom autograd functions, which torch-function modes do not see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from slapo_core.graph.recorder import Recorder

__all__ = ["ApplyFunction", "autograd_functions"]


class ApplyFunction:
    """``function.apply`` as a target of a graph: one call, with the backward that its author wrote.

    Args:
        function: the custom autograd function.
    """

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = f"{function.__name__}_apply"
        self.__module__ = function.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ApplyFunction) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)


@contextlib.contextmanager
def autograd_functions(recorder: Recorder) -> Iterator[None]:
    """While this lasts, a call of a custom ``torch.autograd.Function`` is one call in the graph.

    What its forward computes would be seen, but without its backward.
    """
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call = original.__get__(None, cls)
        if recorder.is_paused:
            return call(*args, **kwargs)
        return recorder.record_call(call, ApplyFunction(cls), args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment, unused-ignore]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
