"""Plugin objects of this process: scripts and notebooks without a package."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from slapo_core.errors import ConflictingPluginError, RejectedPluginError
from slapo_core.plugins import rules
from slapo_core.plugins.model import LOCAL_VERSION, Entry, Plugin, noun
from slapo_core.spec.kinds import KINDS

if TYPE_CHECKING:
    from slapo_core.spec.primitive import Primitive

__all__ = ["LocalEntries", "register_primitive"]

_Class = TypeVar("_Class", bound="type[Primitive]")


def register_primitive() -> Callable[[_Class], _Class]:
    """Add a primitive to the current registry: a decorator for scripts and notebooks.

    Running the cell again replaces the class. A package declares an entry point instead::

        @slapo.register_primitive()
        @dataclass(frozen=True)
        class Freeze(slapo.Primitive):
            name = "my.freeze"
            ...

    Raises:
        RejectedPluginError: the name is not ``<namespace>.<name>``, is reserved, or the class breaks a rule.
        ConflictingPluginError: an installed plugin or another class provides that full name.
    """

    def register(cls: _Class) -> _Class:
        from slapo_core.plugins.process import current_registry

        current_registry().register(cls)
        return cls

    return register


class LocalEntries:
    """The objects registered in a process. `revision` grows with every change."""

    def __init__(self) -> None:
        self._objects: dict[Entry, Any] = {}
        self.revision = 0

    def add(self, cls: Any, *, kind: str, installed: Iterable[Entry]) -> Entry:
        """Add ``cls`` under ``cls.name``; the errors are those of `Registry.register`."""
        entry = self._checked_entry(cls, kind)
        for other in (*installed, *self._objects):
            if (other.kind, other.name) == (kind, entry.name) and other != entry:
                raise ConflictingPluginError(
                    f"cannot register {noun(kind)} '{entry.name}' ({entry.value}): "
                    f"{other.label} provides that name ({other.value})",
                    plugin=other.label,
                    hint="choose another name",
                )
        self._objects[entry] = cls
        self.revision += 1
        return entry

    def get(self, entry: Entry) -> Any:
        """The object registered under ``entry``."""
        return self._objects[entry]

    def plugins(self) -> tuple[Plugin, ...]:
        """What was registered, as one plugin for each top-level module."""
        by_module: dict[str, list[Entry]] = {}
        for entry in sorted(self._objects, key=lambda entry: (entry.kind, entry.name)):
            by_module.setdefault(entry.distribution, []).append(entry)
        return tuple(
            Plugin(module, LOCAL_VERSION, "ok", source="this process", entries=tuple(entries))
            for module, entries in by_module.items()
        )

    @staticmethod
    def _checked_entry(cls: Any, kind: str) -> Entry:
        from slapo_core.plugins.loading import class_violations

        if kind not in KINDS or kind == "hooks":
            kinds = ", ".join(name for name in KINDS if name != "hooks")
            raise RejectedPluginError(f"nothing of kind '{kind}' can be registered in process (kinds: {kinds})")
        name, owner = getattr(cls, "name", None), cls if isinstance(cls, type) else type(cls)
        value = f"{owner.__module__}:{owner.__qualname__}"
        if not isinstance(name, str):
            hint = 'name = "my.freeze"' if KINDS[kind].namespaced else 'name = "mine"'
            raise RejectedPluginError(f"cannot register {value}: it has no name (got {name!r})", hint=hint)
        distribution = owner.__module__.partition(".")[0]
        entry = Entry(kind, name, value, distribution, LOCAL_VERSION)
        violation = rules.name_violation(entry)
        violations = [violation] if violation is not None else class_violations(cls, entry)
        if violations:
            raise RejectedPluginError(f"cannot register {value}: {'; '.join(violations)}", plugin=entry.label)
        return entry
