"""How a function or a module is called in the place of a match: which of its parameters gets which value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slapo_core.spec.graph import Match
from slapo_core.spec.primitive import Violation

__all__ = ["Arguments", "arguments_for", "has_signature", "names_given"]

_KINDS = inspect.Parameter
_POSITIONAL = (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Arguments:
    """What is passed: names of captures, or numbers of inputs.

    Args:
        positional: in the order of the parameters.
        keywords: by name.
    """

    positional: tuple[str | int, ...] = ()
    keywords: tuple[tuple[str, str | int], ...] = ()


def arguments_for(function: Callable[..., Any], match: Match, *, shown: str) -> Arguments | Violation:
    """What ``function`` gets of ``match``: by the names of the captures, else in the order of the inputs.

    A parameter with a default gets what is captured under its name, and else keeps its default.

    Args:
        function: called in the place of the match; it has a signature.
        match: of which it gets inputs and captured constants.
        shown: the name of ``function``, for messages.
    """
    captures = names_given(match)
    parameters = list(inspect.signature(function).parameters.values())
    if captures and {each.name for each in parameters if _is_required(each)} <= set(captures):
        return _by_name(parameters, captures, shown)
    return _by_order(parameters, match, captures, shown)


def has_signature(function: Callable[..., Any]) -> bool:
    """Whether the parameters of a function are known; not those of one in C, such as most of torch's."""
    try:
        inspect.signature(function)
    except (TypeError, ValueError):
        return False
    return True


def names_given(match: Match) -> list[str]:
    """The names of what a match captured and does not compute itself."""
    inner = set(match.nodes)
    return [name for name, value in match.captures.items() if value not in inner]


def _by_name(parameters: list[inspect.Parameter], captures: list[str], shown: str) -> Arguments | Violation:
    positional: list[str | int] = []
    keywords: list[tuple[str, str | int]] = []
    in_order = True  # until a default stays what it is
    taken = set()
    for each in parameters:
        if each.name not in captures or each.kind in (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD):
            in_order = False
            continue
        if each.kind is _KINDS.POSITIONAL_ONLY and not in_order:
            return _mismatch(parameters, captures, shown)
        taken.add(each.name)
        if in_order and each.kind in _POSITIONAL:
            positional.append(each.name)
        else:
            keywords.append((each.name, each.name))
    left = [name for name in captures if name not in taken]
    if left and any(each.kind is _KINDS.VAR_KEYWORD for each in parameters):
        keywords += [(name, name) for name in left]
        left = []
    if left:
        return _mismatch(parameters, captures, shown)
    return Arguments(tuple(positional), tuple(keywords))


def _by_order(
    parameters: list[inspect.Parameter], match: Match, captures: list[str], shown: str
) -> Arguments | Violation:
    count = len(match.inputs)
    places = [each for each in parameters if each.kind in _POSITIONAL]
    required = [each for each in parameters if _is_required(each)]
    more = any(each.kind is _KINDS.VAR_POSITIONAL for each in parameters)
    by_keyword_only = [each for each in required if each.kind is _KINDS.KEYWORD_ONLY]
    names = captures or [f"input_{number}" for number in range(count)]
    fits = len(required) <= count and (count <= len(places) or more) and not by_keyword_only
    constants = [name for name in captures if isinstance(match.captures[name], tuple)]
    named = {match.captures[name]: name for name in captures if isinstance(match.captures[name], str)}
    # A parameter that is called like one input must not get another one.
    crossed = any(
        each.name in captures and named.get(value) != each.name
        for each, value in zip(places, match.inputs, strict=False)
    )
    if not fits or constants or crossed:
        return _mismatch(parameters, names, shown)
    return Arguments(tuple(range(count)))


def _mismatch(parameters: list[inspect.Parameter], names: list[str], shown: str) -> Violation:
    own = ", ".join(str(each.replace(annotation=_KINDS.empty)) for each in parameters)
    return Violation(
        f"{shown}({own}) does not take what the match gives: {', '.join(names) or 'nothing'}",
        f"give it the parameters ({', '.join(names)}); those with a default may be left out of the match",
    )


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is _KINDS.empty and parameter.kind not in (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD)
