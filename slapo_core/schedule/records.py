"""Records as data: schedules saved as JSON and read again, and lines of user code."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from slapo_core.errors import ReplayError, SerializationError, SlapoError, listed, user_frame
from slapo_core.plugins import current_registry
from slapo_core.primitive import Primitive, Record

if TYPE_CHECKING:
    from slapo_core.plugins.registry import Registry


def caller_location(*inside: str) -> str:
    """Return ``"file.py:41"`` of the nearest frame outside of slapo_core, relative to the working directory.

    Args:
        inside: further packages to look outside of.
    """
    frame = user_frame(*inside)
    file = frame.f_code.co_filename
    with contextlib.suppress(FileNotFoundError):  # the working directory was deleted
        file = file.removeprefix(os.getcwd() + os.sep)
    return f"{file}:{frame.f_lineno}"


def count_blocks(model: nn.Module, paths: Iterable[str]) -> dict[str, int]:
    """Count the modules of each list of blocks that has steps, e.g. ``{"encoder.layer": 12}``."""
    steps = tuple(paths)
    return {path: len(blocks) for path, blocks in _lists(model) if any(_is_below(step, path) for step in steps)}


def uncovered(model: nn.Module, paths: Iterable[str], saved: Mapping[str, int]) -> Iterator[str]:
    """Describe each list of equal blocks where only some have steps.

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
                    f"of the {len(names)} {kind.__name__} in '{path}', the schedule has steps for {listed(covered)} "
                    f"and none for {listed(missing)}{written}"
                )


def _lists(model: nn.Module) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Yield the blocks of every list by their own names; one listed twice counts once."""
    for path, module in model.named_modules():
        if path and isinstance(module, nn.ModuleList):
            yield path, dict(module.named_children())


def _is_below(step: str, path: str) -> bool:
    return step == path or step.startswith(f"{path}.")


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


class Codec(ABC):
    """Writes values of a distribution into saved schedules, and reads them.

    Attributes:
        name: of the entry point in the group ``slapo.v1.codecs``.
    """

    name: ClassVar[str]

    @abstractmethod
    def encode(self, value: Any, document: dict[str, Any], registry: Registry | None) -> Any | None:
        """Encode a value as JSON; None if this distribution does not know it.

        Args:
            value: of an argument that is not plain data.
            document: of the schedule, where values may share data under the codec's own key.
            registry: of the schedule; None for a primitive alone, whose JSON holds everything itself.

        Raises:
            SerializationError: it cannot be saved.
        """

    @abstractmethod
    def decode(self, data: Any, document: Mapping[str, Any], registry: Registry | None, *, where: str) -> Any | None:
        """Decode a result of :meth:`encode`; None if ``data`` is something else.

        Raises:
            ReplayError: it is malformed.
        """


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
    document: dict[str, Any] = {
        "format": FORMAT,
        "slapo-core": registry.core_version,
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "blocks": count_blocks(model, [record.path for record in records]),
        "mesh": dict(mesh) if mesh is not None else None,
    }
    document["records"] = [
        {
            "primitive": record.name,
            "path": record.path,
            "arguments": primitive_to_json(record.primitive, where=str(record), document=document, registry=registry),
            "distribution": record.distribution,
            "version": record.version,
            "location": record.location,
        }
        for record in records
    ]
    return document


def fingerprint(document: Mapping[str, Any]) -> str:
    """Hash the scope of a verification: steps, versions, model class, blocks, mesh sizes."""
    records = [{key: value for key, value in one.items() if key != "location"} for one in document["records"]]
    held = {key: value for key, value in document.items() if key != "verified"} | {"records": records}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def load_document(document: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read a document: data, JSON text, or the path of a file.

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
    primitive: Primitive, *, where: str, document: dict[str, Any] | None = None, registry: Registry | None = None
) -> dict[str, Any]:
    """Return a primitive's arguments as JSON; its named functions as ``"module:name"``.

    Args:
        primitive: the step.
        where: how messages call it.
        document: of the schedule, for what codecs share; None writes everything out.
        registry: whose codecs and plugins are asked; None: the current one's codecs, and no plugin by name.

    Raises:
        SerializationError: a value is a lambda, a module or another live object.
    """

    def place(name: str) -> Callable[[str], str]:
        return lambda part: f"argument '{name}'{part} of {where}"

    encoded: dict[str, Any] = {}
    for name, value in primitive.arguments().items():
        function = name_of_function(value) if name in primitive.named_functions else None
        if name in primitive.selections:
            if value is not None:
                encoded[name] = _encode_selection(value, document if document is not None else {}, registry)
        else:
            encoded[name] = function if function is not None else _encode(value, place(name))
    return encoded


def _ask_codecs(registry: Registry | None, ask: Callable[[Codec], Any]) -> Any | None:
    """Return the first answer of a codec that is not None."""
    known = registry if registry is not None else current_registry()
    return next((answer for answer in known.each("codecs", lambda cls: ask(cls())) if answer is not None), None)


def _encode_selection(value: Any, document: dict[str, Any], registry: Registry | None) -> Any:
    encoded = _ask_codecs(registry, lambda codec: codec.encode(value, document, registry))
    if encoded is None:
        raise SerializationError(
            f"the pattern {value!r} has not been matched yet", hint="save the schedule that the step was applied in"
        )
    return encoded


def _decode_selection(data: Any, document: Mapping[str, Any], registry: Registry | None, where: str) -> Any:
    decoded = _ask_codecs(registry, lambda codec: codec.decode(data, document, registry, where=where))
    if decoded is None:
        raise ReplayError(f"{where}: no installed plugin can decode {data!r}", hint="pip install slapo-core[all]")
    return decoded


def primitive_from_json(
    cls: type[Primitive],
    arguments: Mapping[str, Any],
    *,
    document: Mapping[str, Any] | None = None,
    registry: Registry | None = None,
) -> Primitive:
    """Make a primitive from the arguments that ``primitive_to_json`` returned.

    Args:
        cls: its class.
        arguments: by name.
        document: of the schedule, for what codecs share.
        registry: as for ``primitive_to_json``.

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
    selections = {
        name: _decode_selection(arguments[name], document or {}, registry, f"{cls.name}: argument '{name}'")
        for name in cls.selections
        if arguments.get(name) is not None
    }
    try:
        return cls(**{**arguments, **functions, **selections})
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
