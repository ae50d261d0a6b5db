"""Call arguments, bound to the parameters of a forward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any


class MISSING:
    """Marks an omitted argument."""


class Parameters:
    """The parameters of a forward, without the module itself.

    Args:
        forward: takes the module first.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.signature = inspect.signature(forward)
        self.itself, *names = self.signature.parameters
        self.names = tuple(names)
        parameters = [self.signature.parameters[name] for name in names]
        simple = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        has_rest = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        plain = parameters[:-1] if has_rest else parameters
        self._is_simple, self._has_rest = all(parameter.kind in simple for parameter in plain), has_rest
        self._plain = tuple(parameter.name for parameter in plain)
        self._positional = sum(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in plain)
        self._required = frozenset(
            number for number, parameter in enumerate(plain) if parameter.default is inspect.Parameter.empty
        )

    def bind(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return one value per parameter, in their order; :class:`MISSING` for an omitted one.

        Raises:
            TypeError: as a call of the forward would.
        """
        if self._is_simple and len(args) <= self._positional:
            rest = dict(kwargs)
            values = [*args, *[rest.pop(name, MISSING) for name in self._plain[len(args) :]]]
            is_complete = all(values[number] is not MISSING for number in self._required)
            if is_complete and not rest:
                return (*values, MISSING) if self._has_rest else tuple(values)
            if is_complete and self._has_rest and rest.keys().isdisjoint(self._plain):
                return (*values, rest)
        bound = self.signature.bind(module, *args, **kwargs).arguments
        return tuple([bound.get(name, MISSING) for name in self.names])

    def arranging(self, module: Any, count: int, names: tuple[str, ...]) -> Callable[..., Sequence[Any]] | None:
        """Return a function that sorts the values of such calls by parameter; None if they are sorted.

        Args:
            module: the module that is called.
            count: of the positional arguments, whose values come first.
            names: of the keyword arguments, in the order of their values.
        """
        places = self.bind(module, tuple(range(count)), {name: count + number for number, name in enumerate(names)})
        places = tuple(place for place in places if place is not MISSING)
        if places == tuple(range(count + len(names))):
            return None
        if len(places) > 1 and all(type(place) is int for place in places):
            return itemgetter(*places)
        return functools.partial(_arranged, places)


def _arranged(places: tuple[Any, ...], values: tuple[Any, ...]) -> list[Any]:
    """Return values in the order of their places; ``*args`` and ``**kwargs`` have several."""
    return [
        values[place]
        if type(place) is int
        else {name: values[each] for name, each in place.items()}
        if type(place) is dict
        else tuple([values[each] for each in place])
        for place in places
    ]


def call_of(signature: inspect.Signature, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return a call's positional and keyword arguments, without the module, as callers write them.

    What has a default goes by keyword: wrappers around a forward look for it there.

    Args:
        signature: of a forward; its first parameter is the module.
        values: by parameter, without omitted ones.
    """
    parameters = [parameter for parameter in list(signature.parameters.values())[1:] if parameter.name in values]
    has_rest = any(parameter.kind is parameter.VAR_POSITIONAL and values[parameter.name] for parameter in parameters)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in parameters:
        value = values[parameter.name]
        is_either = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if parameter.kind is parameter.VAR_KEYWORD:
            kwargs.update(value)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            args += value
        elif parameter.kind is parameter.POSITIONAL_ONLY or (
            is_either and (has_rest or parameter.default is parameter.empty)
        ):
            args.append(value)
        else:
            kwargs[parameter.name] = value
    return args, kwargs
