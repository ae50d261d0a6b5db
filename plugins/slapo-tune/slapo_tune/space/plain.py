"""Plain data: the values that symbols take, and their way through JSON and back."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Set
from typing import Any

from slapo_tune.space.errors import SpaceError

__all__ = ["decode", "encode", "plain_candidates", "shown"]

LARGEST = 100_000
"""Candidates of one symbol; more are taken for an iterator without end."""


def encode(point: Mapping[str, Any]) -> dict[str, Any]:
    """A point as JSON has it: tuples are lists."""
    return {name: _listed(value) for name, value in point.items()}


def decode(data: Mapping[str, Any]) -> dict[str, Any]:
    """The point that :func:`encode` was given, read from JSON: lists are tuples, everything else is what it was."""
    return {name: _tupled(value) for name, value in data.items()}


def shown(point: Mapping[str, Any]) -> str:
    """A point in a message: ``batch=96, checkpoint=0.5``."""
    return ", ".join(f"{name}={value!r}" for name, value in point.items()) or "nothing"


def plain_candidates(name: str, candidates: Iterable[Any]) -> tuple[Any, ...]:
    """The candidates of a symbol, held to what a space can be made of.

    Raises:
        SpaceError: with the call to write instead.
    """
    call = f"s.choose({name!r}, "
    if isinstance(candidates, str):
        raise SpaceError(
            f"the candidates of {name!r} are one string, {candidates!r}",
            hint=f"{call}[{candidates!r}]) chooses from one",
        )
    if isinstance(candidates, Set):
        raise SpaceError(
            f"the candidates of {name!r} are a set: each process has another order of it",
            hint=f"{call}sorted({{...}}))",
        )
    try:
        values = tuple(itertools.islice(candidates, LARGEST + 1))
    except TypeError:
        raise SpaceError(
            f"the candidates of {name!r} must be a list, a range or another iterable (got {candidates!r})",
            hint=f"{call}[{candidates!r}])",
        ) from None
    if len(values) > LARGEST:
        raise SpaceError(f"{name!r} has more than {LARGEST} candidates", hint=f"{call}range(96, 193, 8))")
    if set(map(type, values)) <= {bool, int, str} and len(set(values)) == len(values):
        return values
    seen: dict[Any, Any] = {}
    for value in values:
        problem = _problem(value)
        if problem:
            raise SpaceError(f"{value!r}, a candidate of {name!r}, {problem[0]}", hint=f"{call}[{problem[1]}, ...])")
        if value in seen:
            twice = "is there twice" if repr(seen[value]) == repr(value) else f"equals {seen[value]!r}, another one"
            raise SpaceError(
                f"{value!r}, a candidate of {name!r}, {twice}",
                hint=f"{call}dict.fromkeys(candidates)) leaves doubles out",
            )
        seen[value] = value
    return values


def _problem(value: Any) -> tuple[str, str] | None:
    """What keeps a value from being plain, and what to write in its place."""
    if value is None or type(value) in (bool, int, str):
        return None
    if type(value) is float:
        return None if math.isfinite(value) else ("is no number that JSON has", "None")
    if type(value) is tuple:
        return next((problem for item in value if (problem := _problem(item))), None)
    name = type(value).__name__
    if isinstance(value, (list, Set)):
        return ("can be changed later; tuples cannot", "(...)" if not isinstance(value, list) else repr(tuple(value)))
    for plain in (int, float, str):
        if isinstance(value, plain):
            return (f"is a {name}, no plain {plain.__name__}", repr(plain(value)))
    if callable(item := getattr(value, "item", None)) and getattr(value, "shape", None) in ((), None):
        return (f"is a {name}, not plain data", repr(item()))
    return (f"is a {name}, not plain data", repr(str(getattr(value, "__name__", value)).rpartition(".")[2]))


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, (list, tuple)) else value


def canonical(path: Iterable[tuple[str, Any]]) -> str:
    """Choices in order, as one line of JSON that is the same in every process."""
    return json.dumps([[name, _listed(value)] for name, value in path], separators=(",", ":"), allow_nan=False)
