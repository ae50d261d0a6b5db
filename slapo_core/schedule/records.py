"""The schedule as data: records to JSON and back."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ReplayError, SerializationError, SlapoError
from slapo_core.schedule.coverage import count_blocks
from slapo_core.schedule.functions import find_function, is_function_name, name_of_function
from slapo_core.schedule.saved_matches import matches_from_json, matches_to_json
from slapo_core.schedule.saved_patterns import SavedPatterns, pattern_to_json
from slapo_core.spec.primitive import Primitive, Record

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.graph.patterns.pattern import GraphPattern
    from slapo_core.plugins.registry import Registry

__all__ = ["FORMAT", "dump_records", "fingerprint", "load_document", "primitive_from_json", "primitive_to_json"]

FORMAT = 1
"""Version of the document's format; a reader refuses a newer one."""


def dump_records(
    records: Sequence[Record],
    *,
    model: nn.Module,
    mesh: Mapping[str, int] | None,
    registry: Registry,
) -> dict[str, Any]:
    """The document of a schedule.

    Raises:
        SerializationError: an argument cannot be carried by JSON; the record and the argument are named.
    """
    patterns: list[Any] = []
    document: dict[str, Any] = {
        "format": FORMAT,
        "slapo-core": registry.core_version,
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "blocks": count_blocks(model, [record.path for record in records]),
        "mesh": dict(mesh) if mesh is not None else None,
        "records": [
            {
                "primitive": record.name,
                "path": record.path,
                "arguments": primitive_to_json(record.primitive, where=str(record), patterns=patterns),
                "distribution": record.distribution,
                "version": record.version,
                "location": record.location,
            }
            for record in records
        ],
    }
    if patterns:  # each once, however many layers it was found in
        document["patterns"] = [pattern_to_json(pattern, registry) for pattern in patterns]
    return document


def fingerprint(document: Mapping[str, Any]) -> str:
    """Hash what a verification holds for: steps, versions, model class, its blocks, mesh sizes; not the locations."""
    records = [{key: value for key, value in one.items() if key != "location"} for one in document["records"]]
    held = {key: value for key, value in document.items() if key != "verified"} | {"records": records}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def load_document(document: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read a document given as data, as JSON text, or as the path of a file.

    Text that does not begin as a JSON object and names a file is a path.

    Raises:
        ReplayError: it is not a schedule, or was written in a newer format.
    """
    if isinstance(document, os.PathLike) or (isinstance(document, str) and _is_file(document)):
        try:
            document = Path(document).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ReplayError(f"the schedule '{document}' cannot be read: {error}") from error
    if isinstance(document, str):
        try:
            document = json.loads(document)
        except ValueError as error:
            raise ReplayError(
                f"this is neither a schedule in JSON nor an existing file: {error}",
                hint="replay(model, 'schedule.json'), or replay(model, sch.to_json())",
            ) from error
    if not isinstance(document, Mapping) or not isinstance(document.get("records"), Sequence):
        raise ReplayError("this is not a schedule: it has no list of 'records'", hint="save one with sch.to_json()")
    written = document.get("format")
    if type(written) is not int or not 1 <= written <= FORMAT:
        raise ReplayError(
            f"the schedule is in format {written!r}; this slapo-core reads up to {FORMAT}",
            hint="pip install --upgrade slapo-core",
        )
    for number, record in enumerate(document["records"], start=1):
        expected: tuple[tuple[str, type], ...] = (("primitive", str), ("path", str), ("arguments", Mapping))
        for key, kind in expected:
            if not isinstance(record, Mapping) or not isinstance(record.get(key), kind):
                raise ReplayError(f"record {number} of the schedule has no valid '{key}'")
    return document


def _is_file(text: str) -> bool:
    if text.lstrip().startswith("{"):
        return False
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # longer than any path, or with a character that no path has
        return False


def primitive_to_json(
    primitive: Primitive, *, where: str, patterns: list[GraphPattern] | None = None
) -> dict[str, Any]:
    """The arguments of a primitive as JSON values; a function, where the primitive says so, as ``"module:name"``.

    Args:
        primitive: the step.
        where: how messages call it.
        patterns: gets those of its matches; see :func:`matches_to_json`.

    Raises:
        SerializationError: a value such as a lambda or a module.
    """

    def place(name: str) -> Callable[[str], str]:
        return lambda part: f"argument '{name}'{part} of {where}"

    encoded: dict[str, Any] = {}
    for name, value in primitive.arguments().items():
        function = name_of_function(value) if name in primitive.named_functions else None
        if name in primitive.matches:
            if value is not None:
                encoded[name] = matches_to_json(value, patterns)
        else:
            encoded[name] = function if function is not None else _encode(value, place(name))
    return encoded


def primitive_from_json(
    cls: type[Primitive], arguments: Mapping[str, Any], *, patterns: SavedPatterns | None = None
) -> Primitive:
    """The primitive value that ``primitive_to_json`` gave the arguments of.

    Args:
        cls: its class.
        arguments: by name.
        patterns: that matches may name.

    Raises:
        ReplayError: an argument that the installed primitive does not have, or one that it needs is missing, or a
            function that is not there.
    """
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(arguments) - known)
    if unknown:
        raise ReplayError(
            f"{cls.name} has no argument {', '.join(map(repr, unknown))}; it has {', '.join(sorted(known))}",
            hint="install the version of the plugin that the schedule was saved with",
        )
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise ReplayError(f"{cls.name}: {error}", hint=f"{cls.name} takes {', '.join(sorted(known))}") from None
    functions = {
        name: find_function(arguments[name], where=f"{cls.name}: argument '{name}'")
        for name in cls.named_functions
        if is_function_name(arguments.get(name))
    }
    matches = {
        name: matches_from_json(
            arguments[name], where=f"{cls.name}: argument '{name}'", patterns=patterns or SavedPatterns()
        )
        for name in cls.matches
        if arguments.get(name) is not None
    }
    try:
        return cls(**{**arguments, **functions, **matches})
    except SlapoError:
        raise
    except Exception as error:  # a check of the primitive's author
        raise ReplayError(f"{cls.name} refuses the arguments: {type(error).__name__}: {error}") from error


def _encode(value: Any, where: Callable[[str], str], part: str = "") -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (tuple, list)):
        return [_encode(item, where, f"{part}[{position}]") for position, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _encode(item, where, f"{part}[{key!r}]") for key, item in value.items()}
    raise SerializationError(
        f"{where(part)} cannot be saved: {_kind(value)}",
        hint="JSON carries numbers, strings, booleans, None, lists and dictionaries; "
        "give this step by name, or keep the schedule as a Python function",
    )


def _kind(value: Any) -> str:
    name = getattr(value, "__name__", None)
    if callable(value) and name == "<lambda>":
        return "it is a lambda"
    if callable(value) and name is not None:
        return f"it is the function {name}"
    return f"it is a live {type(value).__module__}.{type(value).__qualname__}"
