"""What is installed under the name of a primitive, or of a dialect, is this very class."""

from __future__ import annotations

from typing import Any

from slapo_core.errors import PluginError
from slapo_core.plugins import current_registry
from slapo_core.plugins.metadata import LOCAL_VERSION, Entry
from slapo_core.plugins.registry import class_violations
from slapo_core.spec.entry_point_groups import GROUP_PREFIX
from slapo_core.testing.case import Case
from slapo_core.testing.check import CheckError, NotApplicable

__all__ = ["entry_point_agrees", "require_entry_point"]

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
    violations = class_violations(cls, entry)
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
