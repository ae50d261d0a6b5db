"""Resolve the installed names, and load the objects behind them."""

from __future__ import annotations

import contextlib
import inspect
import os
import pkgutil
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from packaging.utils import canonicalize_name

import slapo_core
from slapo_core.errors import PluginError, SlapoError, UnknownNameError, UnusablePluginError, warn_user
from slapo_core.plugins.metadata import (
    CORE_DISTRIBUTION,
    DISABLE,
    FIRST_PARTY,
    LOCAL_VERSION,
    Entry,
    Kind,
    Plugin,
    close_matches,
    core_version,
    known_kinds,
    name_violation,
    noun,
    owner_of,
    read_plugins,
)

_Result = TypeVar("_Result")


class Registry:
    """Everything that plugins provide to one process, known from metadata, imported on use.

    Make one with `discover`. The process's own is `slapo_core.plugins.current_registry()`.

    Attributes:
        core_version: of slapo-core; None where it runs from a bare source tree.
        disabled: the canonical names in ``SLAPO_DISABLE_PLUGINS``, of distributions or of their hooks modules:
            ``"acme-slapo"``, ``"acme-slapo:acme.liveness"``.
    """

    def __init__(
        self,
        installed: Sequence[Plugin],
        *,
        core: str | None,
        disabled: Sequence[str] = (),
        local: dict[Entry, Any] | None = None,
    ) -> None:
        self.core_version = core
        self.disabled = tuple(disabled)
        self._installed = tuple(installed)
        self._local = {} if local is None else local
        self._loaded: dict[Entry, Any] = {}
        self._failures: dict[Entry, tuple[str, BaseException | None]] = {}
        self._indexed: tuple[int, _Index] | None = None
        self.kinds = known_kinds(self._installed)

    @classmethod
    def discover(
        cls,
        *,
        environ: Mapping[str, str] | None = None,
        path: Sequence[str] | None = None,
        core: str | None = None,
        local: dict[Entry, Any] | None = None,
    ) -> Registry:
        """Read the installed plugins; nothing is imported and no bad plugin raises.

        Args:
            environ: environment variables; default ``os.environ``.
            path: directories to search; default ``sys.path``.
            core: the version that ``Requires-Dist`` ranges are compared with; default: the installed one.
            local: entries registered in this process; default: none.
        """
        named = (os.environ if environ is None else environ).get(DISABLE, "")
        parts = [name.partition(":") for name in re.split(r"[,\s]+", named) if name]
        disabled = tuple(f"{canonicalize_name(name)}{colon}{hooks}" for name, colon, hooks in parts)
        core = core_version() if core is None else core
        return cls(read_plugins(path, disabled=disabled, core=core), core=core, disabled=disabled, local=local)

    # -- what there is ------------------------------------------------------------------------------------

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """Every plugin in any state, sorted by name, with the plugins of this process."""
        shown = {plugin.name: plugin for plugin in (*self._installed, *self._local_plugins())}
        for entry, (reason, _) in self._failures.items():
            failed, reason = shown[entry.distribution], f"{noun(entry.kind)} '{entry.name}': {reason}"
            shown[failed.name] = replace(failed, state="unusable", reason=reason, remedy=_reinstall(failed.name))
        return tuple(sorted(shown.values(), key=lambda plugin: plugin.name))

    @property
    def settings_error(self) -> PluginError | None:
        """The error of ``SLAPO_DISABLE_PLUGINS``: a plugin or hooks module that is not installed; else None."""
        for disabled in self.disabled:
            name, colon, hooks = disabled.partition(":")
            plugin = next((plugin for plugin in self._installed if plugin.name == name), None)
            if plugin is None:
                message = f"{DISABLE} names '{disabled}', but no plugin of that name is installed"
                return PluginError(message, hint=self._meant(name) or "`slapo plugins list` shows the installed ones")
            known = [entry.name for entry in (*plugin.entries, *plugin.disabled) if entry.kind == "hooks"]
            if colon and hooks not in known:
                message = f"{DISABLE} names '{disabled}', but {plugin.label} has no hooks module '{hooks}'"
                return PluginError(message, hint=f"its hooks modules: {', '.join(known) or 'none'}")
        return None

    def check_settings(self) -> None:
        """Raise `settings_error`, if there is one."""
        if (error := self.settings_error) is not None:
            raise error

    def plugin(self, distribution: str) -> Plugin:
        """Return the plugin of a distribution, in any state.

        Raises:
            UnknownNameError: it is not installed, or provides nothing to slapo.
        """
        name = canonicalize_name(distribution)
        for plugin in self.plugins:
            if plugin.name in (name, distribution):
                return plugin
        hint = f"pip install {name}"
        hint = hint if name in FIRST_PARTY else self._meant(name) or hint
        raise UnknownNameError(f"no plugin '{distribution}' is installed", plugin=name, hint=hint)

    def names(self, kind: str) -> tuple[str, ...]:
        """The full names of a kind that can be used now, sorted."""
        return tuple(name for name, entry in self._index.full[kind].items() if entry not in self._failures)

    def has(self, kind: str, name: str) -> bool:
        """Return whether a usable plugin provides a full name, even one that fails to import."""
        return name in self._index.full[kind]

    def bare_names(self, kind: str) -> tuple[str, ...]:
        """The bare names of a kind that mean exactly one thing now, sorted."""
        index, usable = self._index, set(self.names(kind))
        return tuple(bare for bare in index.bare[kind] if index.meaning(kind, bare) in usable)

    def namespaces(self) -> tuple[str, ...]:
        """The namespaces of usable names, sorted: ``("core", "tp")``."""
        return self._index.namespaces

    # -- using it -----------------------------------------------------------------------------------------

    def usable_plugin(self, distribution: str) -> Plugin:
        """Return the usable plugin of a distribution; single names may have failed to import.

        Raises:
            PluginError: it is not installed, disabled or unusable.
        """
        name = canonicalize_name(distribution)
        plugin = next((plugin for plugin in self._installed if plugin.name == name), None)
        if plugin is None:
            return self.plugin(distribution)
        if not plugin.usable:
            raise plugin.error(f"plugin {plugin.label}")
        return plugin

    def resolve(self, kind: str, name: str, *, path: str | None = None) -> Entry:
        """Resolve a bare or full name; nothing is imported.

        Args:
            kind: e.g. ``"primitives"``.
            name: ``"shard"`` or ``"tp.shard"``.
            path: the node where the name is used, for the message.

        Raises:
            UnknownNameError: nothing installed provides it; close matches or the distribution to install are named.
            UnusablePluginError: a plugin provides it and cannot be used, or several provide the bare name.
            PluginError: ``SLAPO_DISABLE_PLUGINS`` names a plugin that is not installed.
        """
        self.check_settings()
        index = self._index
        if kind == "primitives" and name not in index.full[kind]:
            former = index.full["renamed"].get(name)
            name = former.value if former is not None else name
        full = name if name in index.full[kind] else index.meaning(kind, name)
        if full is None:
            raise self._missing(kind, name, path)
        return self._checked(index.full[kind][full])

    def load(self, entry_or_name: Entry | str, kind: str = "primitives") -> Any:
        """Load the object behind a name; later calls return the same.

        Raises:
            UnusablePluginError: its import failed (chained), or it breaks a rule of its kind; the same on later uses.
            PluginError: as `resolve` raises for a name.
        """
        if isinstance(entry_or_name, str):
            return self._load(self.resolve(kind, entry_or_name))
        entry = entry_or_name
        plugin = self.usable_plugin(entry.distribution)
        if entry in plugin.lost:
            raise plugin.error(f"{noun(entry.kind)} '{entry.name}' of {plugin.label}")
        return self._load(entry)

    def each(self, kind: str, use: Callable[[Any], _Result]) -> Iterator[_Result]:
        """Use the object behind every name of a kind; leave a broken one out, with a warning.

        Args:
            kind: one whose objects are found without being named, e.g. ``"selectors"``.
            use: called with each object; a `SlapoError` that it raises is passed on.
        """
        for entry in tuple(self._index.full[kind].values()):
            if entry in self._failures:
                continue
            try:
                loaded = self.load(entry)
            except PluginError as error:
                warn_user(f"{error.message}; it is left out")
                continue
            try:
                result = use(loaded)
            except (SlapoError, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - as at an import
                self._failures[entry] = (f"{type(error).__name__}: {error}", error)
                warn_user(f"{self._failure(entry)}; it is left out")
                continue
            yield result

    def load_all(self) -> None:
        """Import everything that plugins provide, so that `plugins` shows what cannot be used."""
        for plugin in self._installed:
            for entry in plugin.entries if plugin.usable else ():
                if entry.kind == "kinds":
                    self._check_base(entry)
                elif entry not in plugin.lost and self.kinds.get(entry.kind, Kind(None)).base is not None:
                    with contextlib.suppress(PluginError):
                        self.load(entry)

    def provider(self, cls_or_instance: Any) -> tuple[str, str]:
        """Return the distribution and version of a primitive's class, e.g. ``("acme-slapo", "1.0")``.

        A class of no installed distribution gives its top-level module and ``"local"``.

        Raises:
            UnusablePluginError: the class was imported past the registry, and its plugin is disabled or unusable.
        """
        cls = cls_or_instance if isinstance(cls_or_instance, type) else type(cls_or_instance)
        entry = next((entry for entry, loaded in self._loaded.items() if loaded is cls), None)
        name, top = getattr(cls, "name", None), cls.__module__.partition(".")[0]
        for plugin in (*self._installed, *self._local_plugins()) if entry is None else ():
            for each in plugin.entries:
                if each.name == name and re.split("[.:]", each.value)[0] == top:
                    if not plugin.usable or each in plugin.lost:
                        raise plugin.error(f"{noun(each.kind)} '{each.name}' of {plugin.label}")
                    entry = each
        if entry is not None:
            return entry.distribution, entry.version
        return (CORE_DISTRIBUTION, self.core_version or LOCAL_VERSION) if top == "slapo_core" else (top, LOCAL_VERSION)

    def register(self, cls: Any, *, kind: str = "primitives") -> None:
        """Add an object of this process, under ``cls.name``; the same object defined again replaces the old one.

        Raises:
            UnusablePluginError: a bad name or class, or an installed plugin or another object provides the full name.
        """
        name, owner = str(getattr(cls, "name", None)), cls if isinstance(cls, type) else type(cls)
        value = f"{owner.__module__}:{owner.__qualname__}"
        entry = Entry(kind, name, value, owner.__module__.partition(".")[0], LOCAL_VERSION)
        violation = name_violation(entry, [plugin.name for plugin in self._installed], self.kinds)
        unnamed = f"{owner.__qualname__} has no name" if getattr(cls, "name", None) is None else violation
        own = class_violations(cls, entry, self.kinds[kind], named=not unnamed)
        if violations := [*filter(None, [unnamed]), *own]:
            from slapo_core.primitive import PRIMITIVE_TEMPLATE

            is_class = own and kind == "primitives"
            hint = PRIMITIVE_TEMPLATE.format(owner.__name__, owner.__name__.lower()) if is_class else None
            raise UnusablePluginError(
                f"cannot register {value}: {'; '.join(violations)}", plugin=entry.label, hint=hint
            )
        other = self._index.full[kind].get(name)
        if other not in (None, entry):
            message = f"cannot register {noun(kind)} '{name}' ({value}): {other.label} provides that name"
            raise UnusablePluginError(
                f"{message} ({other.value})", state="conflict", plugin=other.label, hint="choose another name"
            )
        self._local[entry] = self._loaded[entry] = cls

    # -- inside -------------------------------------------------------------------------------------------

    @property
    def _index(self) -> _Index:
        if self._indexed is None or self._indexed[0] != len(self._local):
            self._indexed = (len(self._local), _Index((*self._installed, *self._local_plugins()), self.kinds))
        return self._indexed[1]

    def _local_plugins(self) -> Iterator[Plugin]:
        """Yield locally registered entries, one plugin for each top-level module."""
        entries = sorted(self._local, key=lambda entry: (entry.kind, entry.name))
        for module in dict.fromkeys(entry.distribution for entry in entries):
            own = tuple(entry for entry in entries if entry.distribution == module)
            yield Plugin(module, LOCAL_VERSION, source="this process", entries=own)

    def _load(self, entry: Entry) -> Any:
        if entry in self._local:
            return self._local[entry]
        self._checked(entry)
        if entry in self._loaded:
            return self._loaded[entry]
        cause = None
        try:
            loaded = pkgutil.resolve_name(entry.value if ":" in entry.value else f"{entry.value}:")
            reason = "; ".join(class_violations(loaded, entry, self.kinds[entry.kind]))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit and the like must not end the user's process
            cause, reason = error, f"{type(error).__name__}: {error}"
        if reason:
            self._failures[entry] = (reason, cause)
            self._checked(entry)
        self._loaded[entry] = loaded
        return loaded

    def _check_base(self, entry: Entry) -> None:
        """Record the failure of a kind whose base class cannot be imported."""
        base = Kind.declared(entry.value).base
        try:
            found = pkgutil.resolve_name(base or "builtins:object")
            reason, cause = "" if isinstance(found, type) else f"{base} must be a class (got {found!r})", None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as of any import
            reason, cause = f"{type(error).__name__}: {error}", error
        if reason:
            self._failures[entry] = (reason, cause)

    def _checked(self, entry: Entry) -> Entry:
        """Return ``entry``; raise a new error, with a short traceback, if loading it has failed before."""
        if entry not in self._failures:
            return entry
        cause = self._failures[entry][1]
        raise UnusablePluginError(
            self._failure(entry), plugin=entry.label, hint=_reinstall(entry.distribution)
        ) from cause

    def _failure(self, entry: Entry) -> str:
        reason, _ = self._failures[entry]
        return f"{noun(entry.kind)} '{entry.name}' of {entry.label} ({entry.value}) cannot be used: {reason}"

    def _missing(self, kind: str, name: str, path: str | None) -> PluginError:
        """Make the error for a name that no usable plugin provides."""
        bare = self._index.bare[kind].get(name)
        if bare is not None:
            return self._ambiguity(kind, name, bare, path)
        kinds = (kind, "queries") if kind == "primitives" else (kind,)  # both are members of nodes
        for plugin in self._installed:
            for entry in plugin.lost if plugin.usable else plugin.entries:
                if entry.kind in kinds and name in (entry.name, entry.bare, entry.namespace):
                    return plugin.error(f"{noun(entry.kind)} '{entry.name}' of {plugin.label}", path=path)
        message = f"no installed plugin provides {noun(kind)} '{name}'"
        absent = [owner for owner in FIRST_PARTY if all(plugin.name != owner for plugin in self._installed)]
        owner = owner_of(name, kind)
        if owner in absent and not self.kinds.get(kind, Kind()).classes:
            hint = f"pip install {owner}"
            return UnknownNameError(f"{message}; it is part of {owner}", path=path, plugin=owner, hint=hint)
        if kind == "primitives" and name in slapo_core.PUBLIC and name.islower():
            return UnknownNameError(message, path=path, hint=f"it is a function: slapo.{name}(sch, ...)")
        known = {*self._index.full[kind], *self._index.bare[kind]}
        close = close_matches(name, known) or close_matches(name.rpartition(".")[2], known)
        if close:
            hint = f"did you mean {' or '.join(map(repr, close))}?"
        else:
            command = kind if kind in ("primitives", "dialects") else f"plugins list --kind {kind}"
            hint = f"`slapo {command}` shows the installed names" if kind in self.kinds else f"nothing here uses {kind}"
            hint += f"; not installed: {', '.join(absent)}" if absent else ""
        return UnknownNameError(message, path=path, hint=hint)

    def _ambiguity(self, kind: str, bare: str, full: Sequence[str], path: str | None) -> PluginError:
        entries = [self._index.full[kind][name] for name in full]
        listed = [f"'{entry.name}' ({entry.label})" for entry in entries]
        if len(entries) == 1:
            query = self._index.full["queries"].get(bare)
            listed.append(f"the namespace '{bare}'" if query is None else f"the query '{bare}' ({query.label})")
        hint = f"write the full name ('{full[0]}'), or disable one ({DISABLE}={entries[-1].distribution})"
        message = f"{noun(kind)} name '{bare}' is ambiguous: {' and '.join(listed)}"
        return UnusablePluginError(message, state="conflict", path=path, plugin=entries[0].label, hint=hint)

    def _meant(self, name: str) -> str | None:
        """Suggest plugins for a mistyped name: the owners of that namespace, or close matches."""
        plugins = self.plugins
        owners = [plugin.name for plugin in plugins if any(entry.namespace == name for entry in plugin.entries)]
        close = owners or close_matches(name, [plugin.name for plugin in plugins])
        return f"did you mean {' or '.join(close)}?" if close else None


@dataclass
class _Index:
    """The names of usable plugins: full name -> entry, and bare name -> full names, of each kind."""

    plugins: Sequence[Plugin]
    kinds: Mapping[str, Kind]
    full: dict[str, dict[str, Entry]] = field(default_factory=lambda: defaultdict(dict))
    bare: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=lambda: defaultdict(dict))

    def __post_init__(self) -> None:
        usable = [
            each for plugin in self.plugins if plugin.usable for each in plugin.entries if each.kind in self.kinds
        ]
        lost = {entry for plugin in self.plugins for entry in plugin.lost}
        for entry in sorted(set(usable) - lost, key=lambda entry: (entry.name, entry.distribution)):
            self.full[entry.kind].setdefault(entry.name, entry)
        for kind, entries in self.full.items():
            bares = {
                entry.name: entry.bare if self.kinds[kind].namespaced else entry.name for entry in entries.values()
            }
            for full, bare in sorted(bares.items(), key=lambda item: item[1]):
                self.bare[kind][bare] = (*self.bare[kind].get(bare, ()), full)
        self.namespaces = tuple(
            sorted({entry.namespace for entry in usable if entry.namespace and entry.kind == "primitives"})
        )

    def meaning(self, kind: str, bare: str) -> str | None:
        """Return the full name of a bare one; None if unknown or ambiguous.

        ``sch["x"].quant`` cannot be both a primitive and the namespace of another plugin, or a query.
        """
        full = self.bare[kind].get(bare, ()) if kind != "primitives" or bare not in self.full["queries"] else ()
        if len(full) != 1 or (bare in self.namespaces and full[0] != bare and not full[0].startswith(f"{bare}.")):
            return None
        return full[0]


def class_violations(loaded: Any, entry: Entry, kind: Kind, *, named: bool = True) -> list[str]:
    """Describe the rules of its kind that a loaded object breaks.

    Args:
        loaded: the object of the entry point.
        entry: the entry point.
        kind: its kind.
        named: whether its name is compared with that of the entry point.
    """
    base = pkgutil.resolve_name(kind.base or "builtins:object")
    if base in (FunctionType, ModuleType):
        if not isinstance(loaded, base):
            return [f"must be a {base.__name__} (got {loaded!r})"]
        first = next(iter(inspect.signature(loaded).parameters), None) if entry.kind == "queries" else "node"
        of = ("schedule", "node", "nodes")
        return [] if first in of else [f"the first parameter of a query must be {', '.join(of)} (got {first})"]
    is_class = isinstance(loaded, type)
    if not (is_class and issubclass(loaded, base)):
        got = f"class {loaded.__qualname__}" if is_class else f"an instance of {type(loaded).__qualname__}"
        return [f"must be a subclass of {base.__module__}.{base.__qualname__} (got {got})"]
    violations = []
    if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
        violations.append(f"class {loaded.__qualname__} does not define {', '.join(missing)}()")
    name = inspect.getattr_static(loaded, "name", None)
    if name != entry.name and named:
        what = f"{loaded.__qualname__}.name"
        violations.append(f"{what} must be '{entry.name}', the name of its entry point (got {name!r})")
    if entry.kind == "primitives":
        from slapo_core.primitive import primitive_violations

        violations += primitive_violations(loaded)
        if hasattr(loaded, "__dataclass_params__") and "__dataclass_params__" not in vars(loaded):
            got = "no dataclass of its own"
            violations.append(f"class {loaded.__qualname__} must be decorated with @dataclass(frozen=True) (got {got})")
    return violations


def _reinstall(distribution: str) -> str:
    return f"pip install --upgrade --force-reinstall {distribution}, or {DISABLE}={distribution}"
