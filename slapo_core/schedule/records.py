"""Records as data: a schedule saved as JSON and read again, and where in your code a step was written."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core.errors import ReplayError, SerializationError, SlapoError
from slapo_core.primitive import Primitive, Record
from slapo_graph.finding import load_pattern
from slapo_graph.match import Match

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.plugins.registry import Registry
    from slapo_graph.patterns.pattern import GraphPattern

_INSIDE = ("slapo_core", "contextlib")


def caller_location() -> str:
    """Return ``"file.py:41"`` of the nearest frame outside of slapo_core, relative to the working directory."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _INSIDE:
        frame = frame.f_back
    file = frame.f_code.co_filename
    here = os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{frame.f_lineno}"


def count_blocks(model: nn.Module, paths: Iterable[str]) -> dict[str, int]:
    """Count the modules of each list of blocks that has steps, e.g. ``{"encoder.layer": 12}``."""
    steps = tuple(paths)
    return {path: len(blocks) for path, blocks in _lists(model) if any(_is_below(step, path) for step in steps)}


def uncovered(model: nn.Module, paths: Iterable[str], saved: Mapping[str, int]) -> Iterator[str]:
    """Describe each list of blocks of one class of which only some have steps.

    Args:
        model: the reference model.
        paths: of the steps.
        saved: what :func:`count_blocks` gave for the model that the schedule was written for: where the number is the
            same, it was written so.
    """
    steps = tuple(paths)
    for path, blocks in _lists(model):
        if saved.get(path) == len(blocks):
            continue
        for kind in dict.fromkeys(type(block) for block in blocks.values()):
            names = [name for name, block in blocks.items() if type(block) is kind]
            covered = [name for name in names if any(_is_below(step, f"{path}.{name}") for step in steps)]
            if covered and covered != names:
                missing = [name for name in names if name not in covered]
                written = f"; it was saved from a model with {saved[path]} there" if path in saved else ""
                yield (
                    f"of the {len(names)} {kind.__name__} in '{path}', the schedule has steps for {_shown(covered)} "
                    f"and none for {_shown(missing)}{written}"
                )


def _lists(model: nn.Module) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Yield the blocks of every list by their own names; one listed twice counts once."""
    for path, module in model.named_modules():
        if path and isinstance(module, nn.ModuleList):
            yield path, dict(module.named_children())


def _is_below(step: str, path: str) -> bool:
    return step == path or step.startswith(f"{path}.")


def _shown(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:3])}, ..., {names[-1]} ({len(names)} in all)"


_FUNCTION_NAME = re.compile(r"[^:]+:[^\W\d]\w*")


def is_function_name(text: Any) -> bool:
    """Return whether a saved argument names a function (``"module:name"``), not a plain text (``"inductor"``)."""
    return isinstance(text, str) and _FUNCTION_NAME.fullmatch(text) is not None


def name_of_function(value: Any) -> str | None:
    """Return ``"module:name"`` of a function at the top level of a module; None for other functions."""
    if not isinstance(value, FunctionType):
        return None
    module = sys.modules.get(value.__module__)
    found: Any = vars(module).get(value.__qualname__) if module is not None else None
    return f"{value.__module__}:{value.__qualname__}" if found is value else None


def find_function(name: str, *, where: str) -> Any:
    """Find the function that `name_of_function` named.

    Nothing is imported: that would run code which a document chooses, and documents may come from anywhere.

    Raises:
        ReplayError: the module is not imported, or has no such function.
    """
    module, _, own = name.partition(":")
    if module not in sys.modules:
        raise ReplayError(
            f"{where} is the function '{name}', and the module {module} is not imported",
            hint=f"`import {module}` before replaying, if you trust the schedule: replay itself imports nothing",
        )
    function: Any = vars(sys.modules[module]).get(own)
    if name_of_function(function) != name:
        raise ReplayError(
            f"{where} is the function '{name}', and the module {module} has no such function",
            hint="replay with the version of the module that the schedule was saved with",
        )
    return function


def pattern_to_json(pattern: GraphPattern, registry: Registry) -> Any:
    """Return a pattern as JSON: ``{"name": "fusion.sdpa", ...}`` if a plugin provides exactly this one.

    Raises:
        SerializationError: it holds a value without a name.
    """
    if pattern.name is not None and _of_plugin(pattern.name, registry) == pattern:
        distribution, version = registry.provider(registry.load(pattern.name, "patterns"))
        return {"name": pattern.name, "distribution": distribution, "version": version}
    return pattern.to_data()


class SavedPatterns:
    """The patterns of a document, each read once, when a match needs it.

    Args:
        saved: as JSON holds them.
        registry: whose plugins provide those with a name; None knows none.
    """

    def __init__(self, saved: Any = (), registry: Registry | None = None) -> None:
        self._saved, self._registry = saved, registry
        self._read: dict[int, GraphPattern] = {}

    def get(self, which: Any, *, where: str) -> GraphPattern:
        """Return a pattern by its number, or read the one given in place of a number.

        Raises:
            ReplayError: there is none, it is malformed, or no plugin provides it.
        """
        if type(which) is not int:
            return self._from_json(which, where)
        if which not in self._read:
            if not isinstance(self._saved, Sequence) or not 0 <= which < len(self._saved):
                raise ReplayError(f"{where} names pattern {which}, which the schedule does not hold")
            self._read[which] = self._from_json(self._saved[which], where)
        return self._read[which]

    def _from_json(self, value: Any, where: str) -> GraphPattern:
        from slapo_graph.patterns.pattern import GraphPattern

        if not isinstance(value, Mapping) or "name" not in value:
            return GraphPattern.from_data(value, lambda name: find_function(name, where=where))
        name = value["name"]
        found, reason, hint = None, "no plugin provides it", None
        try:
            found = _of_plugin(name, self._registry) if isinstance(name, str) else None
        except SlapoError as error:
            reason, hint = error.message, error.hint
        if found is None:
            saved_with = f"saved with {value.get('distribution')} {value.get('version')}"
            raise ReplayError(f"{where} is the pattern {name!r}, {saved_with}: {reason}", hint=hint)
        return found


def _of_plugin(name: str, registry: Registry | None) -> GraphPattern | None:
    """Return the pattern that a plugin provides by this name; None if there is none."""
    from slapo_graph.patterns.definition import pattern_of

    if registry is None or load_pattern(registry, name) is None:
        return None
    return pattern_of(name, lambda each: load_pattern(registry, each))


def matches_to_json(value: Any, patterns: list[GraphPattern] | None = None) -> list[dict[str, Any]]:
    """As JSON values.

    Args:
        value: the matches.
        patterns: theirs are put there, where they are not yet, and named by their numbers; None writes them out.

    Raises:
        SerializationError: a pattern has a value without a name; or there are no matches yet, but a pattern: the
            primitive was never applied.
    """
    matches = (value,) if isinstance(value, Match) else value
    if not isinstance(matches, tuple | list) or not all(isinstance(match, Match) for match in matches):
        raise SerializationError(
            f"the pattern {value!r} was not looked for yet", hint="save the schedule that the step was applied in"
        )
    return [
        {
            "path": match.path,
            "pattern": match.pattern.to_data() if patterns is None else _number(match.pattern, patterns),
            "index": match.index,
            "total": match.total,
        }
        for match in matches
    ]


def _number(pattern: GraphPattern, patterns: list[GraphPattern]) -> int:
    if pattern not in patterns:
        patterns.append(pattern)
    return patterns.index(pattern)


def matches_from_json(value: Any, *, where: str, patterns: SavedPatterns) -> tuple[Match, ...]:
    """Read the result of :func:`matches_to_json`; matches are located when the step is applied.

    Raises:
        ReplayError: it is malformed.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ReplayError(f"{where} is not a list of matches (got {value!r})")
    found = []
    for each in value:
        numbers = (each.get("index"), each.get("total")) if isinstance(each, Mapping) else ()
        is_sound = len(numbers) == 2 and all(type(number) is int for number in numbers)
        if not is_sound or not isinstance(each.get("path"), str) or not 0 <= each["index"] < each["total"]:
            raise ReplayError(f"{where} holds a value that is not a match: {each!r}")
        pattern = patterns.get(each.get("pattern"), where=where)
        found.append(Match(each["path"], pattern, each["index"], each["total"]))
    return tuple(found)


FORMAT = 1
"""Version of the document's format; a reader refuses a newer one."""


def dump_records(
    records: Sequence[Record],
    *,
    model: nn.Module,
    mesh: Mapping[str, int] | None,
    registry: Registry,
) -> dict[str, Any]:
    """Make the document of a schedule.

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
    """Hash the scope of a verification: steps, versions, model class, its blocks, mesh sizes; not the locations."""
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
    """Return a primitive's arguments as JSON values; functions, where the primitive says so, as ``"module:name"``.

    Args:
        primitive: the step.
        where: how messages call it.
        patterns: gets those of its matches; see :func:`matches_to_json`.

    Raises:
        SerializationError: a value is a lambda, a module or another live object.
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
    """Make a primitive from the arguments that ``primitive_to_json`` returned.

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
