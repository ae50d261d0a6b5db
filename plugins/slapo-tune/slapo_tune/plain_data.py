"""Plain data of a space: candidates of a symbol, and points as JSON."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Set
from typing import Any

from slapo_tune.errors import SpaceError

LARGEST = 100_000
"""Candidates of one symbol; more count as an endless iterator."""


def encode(point: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a point for JSON: tuples become lists."""
    return {name: _listed(value) for name, value in point.items()}


def decode(data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a point from JSON: lists become tuples."""
    return {name: _tupled(value) for name, value in data.items()}


def shown(point: Mapping[str, Any]) -> str:
    """Format a point for a message: ``batch=96, checkpoint=0.5``."""
    return ", ".join(f"{name}={value!r}" for name, value in point.items()) or "nothing"


def plain_candidates(name: str, candidates: Iterable[Any]) -> tuple[Any, ...]:
    """Check the candidates of a symbol.

    Raises:
        SpaceError: unsupported candidates; with the corrected call.
    """
    call = f"s.choose({name!r}, "
    if isinstance(candidates, str):
        raise SpaceError(
            f"the candidates of {name!r} must be a list (got the string {candidates!r})",
            hint=f"{call}[{candidates!r}])",
        )
    if isinstance(candidates, Set):
        raise SpaceError(
            f"the candidates of {name!r} must have an order (got a set, which each process orders differently)",
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
        raise SpaceError(f"{name!r} must have at most {LARGEST} candidates", hint=f"{call}range(96, 193, 8))")
    if set(map(type, values)) <= {bool, int, str} and len(set(values)) == len(values):
        return values
    seen: dict[Any, Any] = {}
    for value in values:
        problem = _problem(value)
        if problem:
            raise SpaceError(f"candidate {value!r} of {name!r} {problem[0]}", hint=f"{call}[{problem[1]}, ...])")
        if value in seen:
            other = "is listed twice" if repr(seen[value]) == repr(value) else f"equals candidate {seen[value]!r}"
            raise SpaceError(
                f"candidate {value!r} of {name!r} {other}",
                hint=f"{call}dict.fromkeys(candidates)) removes duplicates",
            )
        seen[value] = value
    return values


def _problem(value: Any) -> tuple[str, str] | None:
    """Return why a value is not plain data, and its replacement."""
    if value is None or type(value) in (bool, int, str):
        return None
    if type(value) is float:
        return None if math.isfinite(value) else ("is not finite, and JSON cannot store it", "None")
    if type(value) is tuple:
        return next((problem for item in value if (problem := _problem(item))), None)
    name = type(value).__name__
    if isinstance(value, (list, Set)):
        return ("is mutable", "(...)" if not isinstance(value, list) else repr(tuple(value)))
    for plain in (int, float, str):
        if isinstance(value, plain):
            return (f"is a {name}, not a plain {plain.__name__}", repr(plain(value)))
    if callable(item := getattr(value, "item", None)) and getattr(value, "shape", None) in ((), None):
        return (f"is a {name}, not plain data", repr(item()))
    return (f"is a {name}, not plain data", repr(str(getattr(value, "__name__", value)).rpartition(".")[2]))


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, (list, tuple)) else value


def canonical(path: Iterable[tuple[str, Any]]) -> str:
    """Encode choices in order, as one line of JSON that is equal in all processes."""
    return json.dumps([[name, _listed(value)] for name, value in path], separators=(",", ":"), allow_nan=False)
