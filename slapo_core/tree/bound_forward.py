"""`BoundForward`: an instance-level forward that can be copied and pickled with its module."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core.errors import SerializationError

if TYPE_CHECKING:
    from slapo_core.spec.edit import Forward

__all__ = ["BoundForward"]


class BoundForward:
    """What stands in ``module.__dict__["forward"]`` after ``edit.wrap_forward``: callable like a bound method.

    Not a bound method itself, because pickle stores that by its name alone: the module would come back with its class's
    own forward, and nobody would notice.

    Args:
        module: the module that is called.
        wrapper: makes the new forward of the present one; both take the module first.
    """

    def __init__(self, module: nn.Module, wrapper: Callable[[Forward], Forward]) -> None:
        self._module = module
        self._wrapper = wrapper
        self._inner: Any = module.__dict__.get("forward")
        self._function = _made_by(wrapper, module, self._inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._module, *args, **kwargs)

    @property
    def __self__(self) -> nn.Module:
        """The module, as of a bound method."""
        return self._module

    @property
    def __func__(self) -> Forward:
        """The forward that takes the module first, as of a bound method."""
        return self._function

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self._function)
        parameters = list(signature.parameters.values())
        if parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            parameters = parameters[1:]
        return signature.replace(parameters=parameters)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundForward:
        """Bound to the copy of the module; the functions are shared, as those of a class are."""
        twin = BoundForward.__new__(BoundForward)
        memo[id(self)] = twin
        twin._module = copy.deepcopy(self._module, memo)
        twin._inner = copy.deepcopy(self._inner, memo)
        twin._wrapper, twin._function = self._wrapper, self._function
        return twin

    def __getstate__(self) -> dict[str, Any]:
        wrapper = self._wrapper
        while isinstance(wrapper, functools.partial):
            wrapper = wrapper.func
        if isinstance(wrapper, FunctionType) and "<" in wrapper.__qualname__:  # <locals>, <lambda>
            raise SerializationError(
                f"a {type(self._module).__name__} cannot be pickled: its forward is wrapped by "
                f"{wrapper.__module__}.{wrapper.__qualname__}, which has no name to be found by again",
                hint="save the state dict instead; or, in the primitive, give edit.wrap_forward a function that is "
                "defined at the top level of its module, with functools.partial for its arguments",
            )
        return {"_module": self._module, "_wrapper": self._wrapper, "_inner": self._inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._function = _made_by(self._wrapper, self._module, self._inner)

    def __repr__(self) -> str:
        return f"<forward of {type(self._module).__name__}, wrapped>"


def _made_by(wrapper: Callable[[Forward], Forward], module: nn.Module, own: Any) -> Forward:
    made = wrapper(_taking_the_module(module, own))
    if not callable(made):
        raise TypeError(f"the function given to wrap_forward must return a function (got {made!r})")
    return made


def _taking_the_module(module: nn.Module, own: Any) -> Forward:
    """The present forward as a function of the module and its arguments."""
    if own is None:
        return type(module).forward
    if isinstance(own, (BoundForward, MethodType)) and own.__self__ is module:
        return own.__func__

    def forward(_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)  # set by the user on this very instance

    with contextlib.suppress(TypeError, ValueError):  # a callable in C has no signature to show
        signature = inspect.signature(own)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[itself, *signature.parameters.values()]
        )
    return forward
