"""Check a plugin's declarations: documentation, entry point, import cost, JSON."""

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
from slapo_testing.case import Case, make_primitive
from slapo_testing.check import CheckError, NotApplicable
from slapo_testing.probe import MODULE_LIMIT, probe


def documentation(case: Case) -> None:
    """The docstring has a sentence, each argument, and the rewrite."""
    cls = type(case.value())
    violations = documentation_violations(cls)
    if violations:
        raise CheckError(
            f"the docstring of {cls.__qualname__} is incomplete",
            required="a sentence as first line, 'name: text' for each field, 'rewrite: before -> after'",
            got="; ".join(violations),
            hint=f"complete the docstring in {cls.__module__}; `slapo primitives core.checkpoint` shows a complete one",
        )


def documentation_violations(cls: type) -> list[str]:
    """List the missing parts of a primitive's docstring."""
    own = vars(cls).get("__doc__")
    # The docstring of a dataclass without one is its signature.
    if not own or own.startswith(f"{cls.__name__}("):
        return ["there is no docstring"]
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
    """The entry point of the primitive's name loads this class, a frozen dataclass of that name."""
    require_entry_point(type(case.value()), "primitives")


def require_entry_point(cls: Any, kind: str) -> None:
    """Compare a class with the entry point of its name.

    Raises:
        CheckError: the entry point is missing or names another class, or the class breaks a rule of its kind.
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
            got=f"no entry point for the name '{cls.name}' or the class {value}",
            hint=hint,
        )
    _hold(cls, entry, declaration)
    if entry.version == LOCAL_VERSION:
        raise NotApplicable(f"'{cls.name}' was registered in this process, without an entry point")
    try:
        loaded = registry.load(entry)
    except PluginError as error:
        raise CheckError(
            f"the entry point '{entry.name}' of {entry.label} cannot be loaded",
            required=declaration,
            got=str(error),
            hint=f"`slapo plugins check {entry.distribution} --traceback` shows the traceback",
        ) from error
    if loaded is not cls:
        raise CheckError(
            f"the entry point '{entry.name}' of {entry.label} loads another class",
            required=f"{declaration}, in {_file(cls)}",
            got=f"{loaded.__module__}:{loaded.__qualname__}, in {_file(loaded)}",
            hint="correct the entry point, or test its class; after a change: `pip install -e .`",
        )


def _hold(cls: Any, entry: Entry, declaration: str) -> None:
    violations = class_violations(cls, entry, KINDS[entry.kind])
    if violations:
        raise CheckError(
            f"class {cls.__qualname__} does not match its entry point '{entry.name}'",
            required=f"{_CLASSES[entry.kind]}, with {declaration}",
            got="; ".join(violations),
            hint="correct the class; or the entry point in pyproject.toml, then `pip install -e .`",
        )


def _file(cls: Any) -> str:
    import sys

    return str(getattr(sys.modules.get(cls.__module__), "__file__", None) or "no file")


def light_import(case: Case) -> None:
    """The module imports in a new process silently, without frameworks and side effects."""
    require_light_import(type(case.value()))


def require_light_import(cls: type) -> None:
    """Check the module of a class against the rules of imports.

    Raises:
        CheckError: with each broken rule.
        NotApplicable: the class is defined in a script.
    """
    module = cls.__module__
    if module == "__main__":
        raise NotApplicable(f"{cls.__qualname__} is defined in a script, which is not imported")
    violations = probe(module).violations
    if violations:
        raise CheckError(
            f"importing {module} is not light",
            required=f"at most {MODULE_LIMIT} modules beyond torch, no framework among them; nothing printed or "
            "written, no process, thread or connection started, no global state changed",
            got="; ".join(violations),
            hint="import frameworks inside the functions that use them; do no work at import",
        )


def json_round_trip(case: Case) -> None:
    """The value round-trips through JSON, and its schedule replays to equal records."""
    value = case.value()
    if not case.serializable:
        _must_refuse(value)
        return
    with registered(value, *(make_primitive(step) for _, step in case.before)):
        bench = prepare(case, mesh_size=2)
        round_trip_value(bench.bound(case.path, value))
        bench.apply()
        again = replay(build_model(case), bench.schedule.to_json(), example_inputs=bench.schedule.example_inputs)
        for saved, replayed in zip(bench.schedule.records, again.records, strict=True):
            if saved != replayed or saved.edits != replayed.edits:
                raise CheckError(
                    "the schedule replays to other records",
                    required=f"{saved!r} with the edits {saved.edits}",
                    got=f"{replayed!r} with the edits {replayed.edits}",
                    hint="let apply() depend on fields and node only, not on global state or random numbers",
                )


def round_trip_value(value: Primitive) -> None:
    """Compare a value with its copy through JSON.

    Raises:
        CheckError: JSON cannot store the value, or the copy differs or has another hash.
    """
    try:
        arguments = primitive_to_json(value, where=str(value))
    except SerializationError as error:
        raise CheckError(
            "JSON cannot store the arguments",
            required="fields that are numbers, strings, booleans, None, tuples or string-keyed dictionaries",
            got=error.message,
            hint="take a name instead of a live object; or Case(..., serializable=False)",
        ) from error
    copy = primitive_from_json(type(value), json.loads(json.dumps(arguments)))
    if copy != value:
        raise CheckError(
            "the value read from JSON differs",
            required=repr(value),
            got=repr(copy),
            hint="let __post_init__ accept lists for tuples and strings for keys, and keep eq",
        )
    if _hash_of(copy) != _hash_of(value):
        raise CheckError(
            "the value read from JSON is equal but has another hash",
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
            required="hashable fields: primitives are keys and are compared across ranks",
            got=f"{error}, in {value!r}",
            hint="convert dictionaries to sorted tuples of pairs in __post_init__",
        ) from error


def _must_refuse(value: Primitive) -> None:
    try:
        arguments = primitive_to_json(value, where=str(value))
    except SerializationError:
        return
    raise CheckError(
        "the case has serializable=False, but JSON can store the value",
        required="an argument that JSON cannot store",
        got=json.dumps(arguments),
        hint="remove serializable=False from the Case",
    )
