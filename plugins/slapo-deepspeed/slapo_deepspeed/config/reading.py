"""The user's configuration as a dictionary of plain values: given as one, or read from a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slapo_core import BuildError

__all__ = ["Source", "read"]

_EXAMPLE = 'config={"zero_optimization": {"stage": 1}}, or config="ds_config.json"'


@dataclass(frozen=True)
class Source:
    """Where a configuration comes from, to name a place in it.

    Args:
        file: the path of the JSON file; None for a dictionary.
    """

    file: str | None = None

    def of(self, key: str) -> str:
        """A place, e.g. ``"'zero_optimization.stage' of ds.json"``.

        Args:
            key: the keys on the way, with dots, e.g. ``"zero_optimization.stage"``.
        """
        return f"'{key}' of {self}"

    def __str__(self) -> str:
        return "config" if self.file is None else self.file


def read(config: Any) -> tuple[dict[str, Any], Source]:
    """A copy of the configuration, and where it comes from.

    Args:
        config: a dictionary as DeepSpeed takes it, the path of a JSON file, or None for an empty one.

    Raises:
        BuildError: it is neither, the file cannot be read, or a value is none that JSON has.
    """
    if config is None:
        return {}, Source()
    if isinstance(config, Mapping):
        source = Source()
        return {key: _plain(value, source, str(key)) for key, value in _keys(config, source, "")}, source
    if not isinstance(config, (str, os.PathLike)):
        raise BuildError(
            f"config must be a dictionary, or the path of a DeepSpeed JSON file (got {config!r})", hint=_EXAMPLE
        )
    file = os.fspath(config)
    if isinstance(file, bytes):
        raise BuildError(f"config must be a path as a string (got {file!r})", hint=_EXAMPLE)
    return _read_file(file), Source(file)


def _read_file(file: str) -> dict[str, Any]:
    try:
        with open(file, encoding="utf-8") as stream:
            found = json.load(stream, object_pairs_hook=_once_each, parse_constant=_no_constant)
    except OSError as error:
        why = error.strerror or str(error)
        raise BuildError(f"cannot read the DeepSpeed configuration {file!r}: {why}", hint=_EXAMPLE) from error
    except UnicodeDecodeError as error:
        raise BuildError(f"the DeepSpeed configuration {file!r} is no text in UTF-8", hint=_EXAMPLE) from error
    except json.JSONDecodeError as error:
        raise BuildError(
            f"the DeepSpeed configuration {file!r} is no JSON: {error.msg} in line {error.lineno}, column "
            f"{error.colno}",
            hint="plain JSON: no comments, no comma after the last entry",
        ) from error
    except _RefusedError as error:
        raise BuildError(f"the DeepSpeed configuration {file!r} {error}") from error
    if not isinstance(found, dict):
        raise BuildError(
            f"the DeepSpeed configuration {file!r} must be an object, {{...}} (got {type(found).__name__})",
            hint=_EXAMPLE,
        )
    return found


class _RefusedError(ValueError):
    """What the JSON parser was told to refuse."""


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise _RefusedError(f"has the key {key!r} twice: {json.dumps(made[key])} and {json.dumps(value)}")
        made[key] = value
    return made


def _no_constant(name: str) -> Any:
    raise _RefusedError(f"holds {name}, which JSON does not have")


def _keys(config: Mapping[Any, Any], source: Source, place: str) -> list[tuple[str, Any]]:
    for key in config:
        if not isinstance(key, str):
            raise BuildError(f"the keys of {source.of(place) if place else 'config'} must be strings (got {key!r})")
    return list(config.items())


def _plain(value: Any, source: Source, place: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item, source, f"{place}.{key}") for key, item in _keys(value, source, place)}
    if isinstance(value, (list, tuple)):
        return [_plain(item, source, f"{place}[{number}]") for number, item in enumerate(value)]
    raise BuildError(
        f"{source.of(place)} must be a value that JSON has (got {value!r})",
        hint="a number, a string, true or false, null, a list or a dictionary of such",
    )
