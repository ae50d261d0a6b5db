"""A replacement in another variant, whose match captured other things: a mask that is there now, one that is absent."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from slapo_core.graph.rewriting.placing import CannotPlace

if TYPE_CHECKING:
    from slapo_core.graph.rewriting.actions import Place

__all__ = ["adapted", "given_by"]

Positional = tuple[str | int, ...]
Keywords = tuple[tuple[str, str | int], ...]
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def given_by(place: Place) -> frozenset[str]:
    """The names of what a match captured and does not compute itself."""
    inside = set(place.nodes)
    return frozenset(
        name for name, value in place.captures.items() if not (isinstance(value, fx.Node) and value in inside)
    )


def adapted(
    new: Callable[..., Any] | str, module: nn.Module, arguments: Positional, keywords: Keywords, place: Place
) -> tuple[Positional, Keywords]:
    """The arguments of a call of ``new`` in ``place``, by position and by name.

    What is captured there and was not where the replacement was made is passed too, under its own name; what was, and
    is not now, is left out where ``new`` has a default. For the alternatives of a pattern differ in what they compute
    only by what they capture.

    Args:
        new: what is called: a function, or the path of a module.
        module: the traced one.
        arguments: what was passed by position.
        keywords: what was passed by name.
        place: where, with the names that were captured where the replacement was made.

    Raises:
        CannotPlace: ``new`` cannot be called so.
    """
    if place.captured_first is None:
        return arguments, keywords
    given = given_by(place)
    gained, lost = given - place.captured_first, place.captured_first - given
    if not gained and not lost:
        return arguments, keywords
    parameters = _parameters(module.get_submodule(new).forward if isinstance(new, str) else new)
    optional = {name for name, each in parameters.items() if each.default is not inspect.Parameter.empty}
    while arguments and arguments[-1] in lost and arguments[-1] in optional:
        arguments = arguments[:-1]
    kept = tuple((parameter, which) for parameter, which in keywords if which not in lost or parameter not in optional)
    passed = (*arguments, *(which for _, which in kept))
    if gained - parameters.keys() or any(which in lost or isinstance(which, int) for which in passed):
        raise CannotPlace(
            f"the match captured {_listed(place.captured_first)} where the replacement was made, and {_listed(given)} "
            f"there, which what replaces it cannot take",
            "a function with parameters of these names, and defaults for those that may be absent",
        )
    return arguments, (*kept, *((name, name) for name in sorted(gained)))


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function in C
        return {}
    return {name: each for name, each in found.items() if each.kind in _BY_NAME}


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"
