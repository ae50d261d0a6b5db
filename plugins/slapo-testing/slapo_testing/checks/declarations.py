"""Check a plugin's declarations: documentation, entry point, import cost, JSON form."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from typing import Any

from slapo_core import replay
from slapo_core.errors import PluginError, SerializationError
from slapo_core.internals import primitive_from_json, primitive_to_json
from slapo_core.plugins import GROUP_PREFIX, KINDS, LOCAL_VERSION, Entry, class_violations, current_registry
from slapo_core.primitive import Primitive
from slapo_testing.bench import build_model, prepare, registered
from slapo_testing.case import Case, made
from slapo_testing.check import CheckError, NotApplicable
from slapo_testing.probe import MODULE_LIMIT, probe


def documentation(case: Case) -> None:
    """The docstring is a sentence, tells every argument, and shows the rewrite."""
    cls = type(case.value())
    violations = documentation_violations(cls)
    if violations:
        raise CheckError(
            f"the docstring of {cls.__qualname__} is incomplete",
            required="a first line that is a sentence, 'name: text' for every field, 'rewrite: before -> after'",
            got="; ".join(violations),
            hint=f"complete the docstring in {cls.__module__}; `slapo primitives core.checkpoint` shows a complete one",
        )


def documentation_violations(cls: type) -> list[str]:
    """List the missing parts of a primitive's docstring."""
    own = vars(cls).get("__doc__")
    # A dataclass without a docstring is given its signature as one.
    if not own or own.startswith(f"{cls.__name__}("):
        return ["it has no docstring"]
    text = inspect.cleandoc(own)
    violations = []
    first = text.partition("\n")[0].strip()
    if not re.match(r"[^\W\d_]", first) or not first.endswith(".") or len(first.split()) < 2:
        violations.append(f"the first line is not a sentence: {first!r}")
    undocumented = [field.name for field in dataclasses.fields(cls) if not _tells(text, field.name.rstrip("_"))]
    if undocumented:
        violations.append(f"no 'name: text' for {', '.join(map(repr, undocumented))}")
    rewrite = re.search(r"^\s*rewrite:(.*)", text, flags=re.MULTILINE | re.DOTALL)
    if rewrite is None:
        violations.append("there is no 'rewrite:' block")
    elif not re.search(r"\S\s*->\s*\S", rewrite[1].strip().partition("\n\n")[0]):
        violations.append("the 'rewrite:' block shows no 'before -> after'")
    return violations


def _tells(text: str, field: str) -> bool:
    return (
        re.search(rf"^[ \t]+{re.escape(field)}(?:\s*\([^)\n]*\))?:[ \t]*\n?[ \t]*[^\s:]", text, re.MULTILINE)
        is not None
    )


_CLASSES = {"primitives": "a frozen dataclass derived from Primitive", "dialects": "a class derived from Dialect"}


def entry_point_agrees(case: Case) -> None:
    """The installed entry point of the primitive's name loads this very class, a frozen dataclass of that name."""
    require_entry_point(type(case.value()), "primitives")


def require_entry_point(cls: Any, kind: str) -> None:
    """Hold a class against the entry point of its name.

    Raises:
        CheckError: there is none, or it names something else, or the class breaks a rule of its kind.
        NotApplicable: the class was registered in this process.
    """
    value = f"{cls.__module__}:{cls.__qualname__}"
    declaration = f'[project.entry-points."{GROUP_PREFIX}{kind}"]: "{cls.name}" = "{value}"'
    registry = current_registry()
    found = [
        entry
        for plugin in registry.plugins
        for entry in plugin.entries
        if entry.kind == kind and (entry.name == cls.name or entry.value == value)
    ]
    entry = next((item for item in found if item.name == cls.name), found[0] if found else None)
    if entry is None:
        hint = "declare it in pyproject.toml and run `pip install -e .` again"
        if kind == "primitives":
            hint += "; in a script or notebook, decorate the class with @slapo.register_primitive()"
        raise CheckError(
            f"no installed distribution provides '{cls.name}'",
            required=declaration,
            got=f"an entry point for none of the name '{cls.name}' and the class {value}",
            hint=hint,
        )
    _hold(cls, entry, declaration)
    if entry.version == LOCAL_VERSION:
        raise NotApplicable(f"'{cls.name}' was registered in this process: it has no entry point to agree with")
    try:
        loaded = registry.load(entry)
    except PluginError as error:
        raise CheckError(
            f"the entry point '{entry.name}' of {entry.label} cannot be loaded",
            required=declaration,
            got=str(error),
            hint=f"`slapo plugins check {entry.distribution} --traceback` shows everything",
        ) from error
    if loaded is not cls:
        raise CheckError(
            f"the entry point '{entry.name}' of {entry.label} loads another class",
            required=f"{declaration}, in {_file(cls)}",
            got=f"{loaded.__module__}:{loaded.__qualname__}, in {_file(loaded)}",
            hint="correct the entry point, or test the class that it names; after a change: `pip install -e .`",
        )


def _hold(cls: Any, entry: Entry, declaration: str) -> None:
    violations = class_violations(cls, entry, KINDS[entry.kind])
    if violations:
        raise CheckError(
            f"the class {cls.__qualname__} and its entry point '{entry.name}' do not agree",
            required=f"{_CLASSES[entry.kind]}, with {declaration}",
            got="; ".join(violations),
            hint="correct the class, or the entry point in pyproject.toml and run `pip install -e .` again",
        )


def _file(cls: Any) -> str:
    import sys

    return str(getattr(sys.modules.get(cls.__module__), "__file__", None) or "no file")


def light_import(case: Case) -> None:
    """A fresh process imports the module silently, without frameworks, and without doing or changing anything."""
    require_light_import(type(case.value()))


def require_light_import(cls: type) -> None:
    """Hold the module of a class against the rules of importing.

    Raises:
        CheckError: every rule that it breaks is named.
        NotApplicable: the class is defined in a script.
    """
    module = cls.__module__
    if module == "__main__":
        raise NotApplicable(f"{cls.__qualname__} is defined in a script: nothing imports it")
    violations = probe(module).violations
    if violations:
        raise CheckError(
            f"importing {module} is not light",
            required=f"at most {MODULE_LIMIT} modules beyond torch, no framework among them; nothing printed or "
            "written, no process, thread or connection started, no global state changed",
            got="; ".join(violations),
            hint="import frameworks and do work inside the functions that need them",
        )


def json_round_trip(case: Case) -> None:
    """The value is the same after JSON, and its schedule replays to the same records."""
    value = case.value()
    if not case.serializable:
        _must_refuse(value)
        return
    with registered(value, *(made(step) for _, step in case.before)):
        bench = prepare(case, mesh_size=2)
        round_trip_value(bench.bound(case.path, value))
        bench.apply()
        again = replay(build_model(case), bench.schedule.to_json(), example_inputs=bench.schedule.example_inputs)
        for saved, replayed in zip(bench.schedule.records, again.records, strict=True):
            if saved != replayed or saved.effects != replayed.effects:
                raise CheckError(
                    "the schedule replays to other records",
                    required=f"{saved!r} with the effects {saved.effects}",
                    got=f"{replayed!r} with the effects {replayed.effects}",
                    hint="let apply depend on the fields and the node only, not on global state or random numbers",
                )


def round_trip_value(value: Primitive) -> None:
    """Hold a value against its copy through JSON.

    Raises:
        CheckError: JSON cannot carry it, or the copy is another value or has another hash.
    """
    try:
        arguments = primitive_to_json(value, where=str(value))
    except SerializationError as error:
        raise CheckError(
            "JSON cannot carry the arguments",
            required="fields that are numbers, strings, booleans, None, tuples or string-keyed dictionaries",
            got=error.message,
            hint="take a name instead of a live object; or say serializable=False in the Case",
        ) from error
    copy = primitive_from_json(type(value), json.loads(json.dumps(arguments)))
    if copy != value:
        raise CheckError(
            "the value made from JSON is another one",
            required=repr(value),
            got=repr(copy),
            hint="let __post_init__ accept what JSON gives back (lists for tuples, strings for keys), and keep eq",
        )
    if _hash_of(copy) != _hash_of(value):
        raise CheckError(
            "the value made from JSON is equal but has another hash",
            required=f"hash {hash(value)}",
            got=f"hash {hash(copy)}",
            hint="do not define __hash__: @dataclass(frozen=True) derives it from the fields",
        )


def _hash_of(value: Primitive) -> int:
    try:
        return hash(value)
    except TypeError as error:
        raise CheckError(
            "the value cannot be hashed",
            required="every field is hashable, so that a primitive can be a key and be compared across ranks",
            got=f"{error}, in {value!r}",
            hint="convert dictionaries to sorted tuples of pairs in __post_init__",
        ) from error


def _must_refuse(value: Primitive) -> None:
    try:
        arguments = primitive_to_json(value, where=str(value))
    except SerializationError:
        return
    raise CheckError(
        "the case says serializable=False, but JSON can carry the value",
        required="an argument that JSON cannot carry",
        got=json.dumps(arguments),
        hint="remove serializable=False from the Case",
    )
