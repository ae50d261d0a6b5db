"""The registry: what is installed, under which names, and how to get it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slapo_core.errors import BrokenPluginError, PluginConfigError, PluginError, RejectedPluginError
from slapo_core.plugins import loading, metadata, rules
from slapo_core.plugins.config import Settings, read_settings
from slapo_core.plugins.local import LocalEntries
from slapo_core.plugins.model import LOCAL_VERSION, Entry, Plugin, State, noun
from slapo_core.plugins.requirements import settings_violations
from slapo_core.plugins.resolution import NameIndex
from slapo_core.spec.kinds import API_MAJOR, KINDS
from slapo_core.spec.reserved import CORE_DISTRIBUTION

__all__ = ["Registry"]


class Registry:
    """Everything that plugins provide to one process, known from metadata; imported one by one when used.

    Make one with `discover`. The process's own is `slapo_core.plugins.current_registry()`.
    """

    def __init__(
        self, installed: Sequence[Plugin], settings: Settings, *, core: str | None, local: LocalEntries | None = None
    ) -> None:
        self.settings = settings
        self.core_version = core
        self._discovered = tuple(installed)  # the states that decide about names
        self._installed = {plugin.name: plugin for plugin in installed}  # the states to show: imports may fail
        self._local = local if local is not None else LocalEntries()
        self._loaded: dict[Entry, Any] = {}
        self._failures: dict[Entry, PluginError] = {}
        self._lock = threading.RLock()
        self._checked = False
        self._view: tuple[int, NameIndex] | None = None

    @classmethod
    def discover(
        cls,
        *,
        environ: Mapping[str, str] | None = None,
        path: Sequence[str] | None = None,
        project: Path | None = None,
        api_major: int = API_MAJOR,
        core: str | None = None,
        local: LocalEntries | None = None,
    ) -> Registry:
        """Read what is installed; nothing is imported and no bad plugin or setting raises.

        Args:
            environ: environment variables; default ``os.environ``.
            path: directories to search; default ``sys.path``.
            project: where the search for ``pyproject.toml`` starts; None reads none.
            api_major: the plugin API of this core; it reads that and the one before.
            core: the version that ``Requires-Dist`` ranges are held against; default: the installed one.
            local: what is registered in process; default: nothing yet.
        """
        settings = read_settings(os.environ if environ is None else environ, project)
        core = metadata.core_version() if core is None else core
        plugins = rules.judge_all(metadata.scan(path), settings, api_major=api_major, core=core)
        return cls(plugins, settings, core=core, local=local)

    # -- what there is ------------------------------------------------------------------------------------

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """Every plugin, whatever its state, sorted by name; those of this process included."""
        everything = (*self._installed.values(), *self._local.plugins())
        return tuple(sorted(everything, key=lambda plugin: plugin.name))

    def plugin(self, distribution: str) -> Plugin | None:
        """The plugin of that distribution; None if it is not installed or provides nothing to slapo."""
        return next((plugin for plugin in self.plugins if plugin.name == distribution), None)

    @property
    def ambiguous(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Bare names that several plugins provide and ``prefer`` does not decide: kind -> bare -> full names."""
        return self._index.ambiguous()

    def names(self, kind: str) -> tuple[str, ...]:
        """The full names of a kind that can be used now, sorted."""
        failed = {entry.name for entry in self._failures if entry.kind == kind}
        return tuple(name for name in self._index.names(kind) if name not in failed)

    def bare_names(self, kind: str) -> tuple[str, ...]:
        """The bare names of a kind that mean exactly one thing now, sorted."""
        usable = set(self.names(kind))
        return tuple(bare for bare, full in self._index.unique(kind).items() if full in usable)

    def namespaces(self) -> tuple[str, ...]:
        """The namespaces of usable names, sorted: ``("core", "tp")``."""
        return self._index.namespaces

    # -- using it -----------------------------------------------------------------------------------------

    @property
    def settings_error(self) -> PluginConfigError | None:
        """What is wrong with the settings, the first thing; None if nothing is. Does not raise."""
        return next(settings_violations(self.settings, self._discovered), None)

    def check_settings(self) -> None:
        """Hold the settings against what is installed.

        Raises:
            PluginConfigError: a malformed setting, a name that is not installed, a requirement that is not met.
            PluginError: with ``SLAPO_STRICT_PLUGINS=1``, the first plugin that is neither ok nor disabled.
        """
        error = self.settings_error
        if error is not None:
            raise error
        if self.settings.strict:
            for plugin in self.plugins:
                if plugin.state not in ("ok", "disabled"):
                    raise plugin.error(f"SLAPO_STRICT_PLUGINS=1: plugin {plugin.label}")

    def require_usable_plugin(self, distribution: str) -> None:
        """Refuse a plugin that is switched off or unusable; if only imports of it failed, its other names still work.

        Raises:
            PluginError: the error of that plugin's state.
        """
        for plugin in self._discovered:
            if plugin.name == distribution and not plugin.usable:
                raise plugin.error(f"plugin {plugin.label}")

    def resolve(self, kind: str, name: str, *, path: str | None = None) -> Entry:
        """What a bare or full name means; nothing is imported.

        Args:
            kind: e.g. ``"primitives"``.
            name: ``"shard"`` or ``"tp.shard"``.
            path: the node where the name is used, for the message.

        Raises:
            PluginConfigError: at first use, when a setting is wrong.
            UnknownNameError: nothing installed provides it; close matches or the distribution to install are named.
            AmbiguousNameError: a bare name of several plugins.
            DisabledPluginError, IncompatiblePluginError, RejectedPluginError, ConflictingPluginError,
            BrokenPluginError: installed, but not usable.
        """
        self._first_use()
        entry = self._index.resolve(kind, name, path=path)
        if entry in self._failures:
            raise self._again(entry)
        return entry

    def load(self, entry_or_name: Entry | str, kind: str = "primitives") -> Any:
        """The object behind a name, imported on first use and then kept.

        Raises:
            BrokenPluginError: its import failed; chained, and the same again on every later use.
            RejectedPluginError: it breaks a rule of its kind, or its import tampered with slapo.
            PluginError: as `resolve` raises for a name.
        """
        if isinstance(entry_or_name, Entry):
            self._first_use()
            entry = self._index.admit(entry_or_name)
        else:
            entry = self.resolve(kind, entry_or_name)
        return self._load(entry)

    def provider(self, cls_or_instance: Any) -> tuple[str, str]:
        """The distribution and version that a primitive's class comes from, e.g. ``("slapo-tp", "0.1.0")``.

        A class of no installed distribution gives its top-level module and ``"local"``.
        """
        cls = cls_or_instance if isinstance(cls_or_instance, type) else type(cls_or_instance)
        entry = self._entry_of(cls)
        if entry is not None:
            return entry.distribution, entry.version
        top = cls.__module__.partition(".")[0]
        return (CORE_DISTRIBUTION, self.core_version or LOCAL_VERSION) if top == "slapo_core" else (top, LOCAL_VERSION)

    def require_usable(self, cls_or_instance: Any) -> None:
        """Refuse a class that the user imported by himself although its plugin is switched off or unusable.

        Raises:
            PluginError: the error of that plugin's state.
        """
        self._first_use()
        entry = self._entry_of(cls_or_instance if isinstance(cls_or_instance, type) else type(cls_or_instance))
        if entry is not None:
            self._index.admit(entry)
            if entry in self._failures:
                raise self._again(entry)

    def register(self, cls: Any, *, kind: str = "primitives") -> None:
        """Add an object of this process, under ``cls.name``; the same object defined again replaces the old one.

        Raises:
            RejectedPluginError: a bad name or class.
            ConflictingPluginError: the full name is provided by an installed plugin or by another object.
        """
        installed = [entry for plugin in self._discovered if plugin.usable for entry in plugin.entries]
        entry = self._local.add(cls, kind=kind, installed=installed)
        with self._lock:
            self._failures.pop(entry, None)
            self._loaded[entry] = cls

    # -- inside -------------------------------------------------------------------------------------------

    @property
    def _index(self) -> NameIndex:
        if self._view is None or self._view[0] != self._local.revision:
            plugins = (*self._discovered, *self._local.plugins())
            index = NameIndex(plugins, prefer=self.settings.prefer, core=self.core_version)
            self._view = (self._local.revision, index)
        return self._view[1]

    def _first_use(self) -> None:
        if self._checked:
            return
        self.check_settings()
        self._checked = True  # before the imports below: a plugin may use the registry while it is imported
        usable = [plugin for plugin in self.plugins if plugin.usable] if self.settings.strict else []
        try:
            for entry in (entry for plugin in usable for entry in plugin.entries if entry.kind in KINDS):
                self._load(entry)
        except BaseException:
            self._checked = False
            raise

    def _load(self, entry: Entry) -> Any:
        with self._lock:
            if entry in self._loaded:
                return self._loaded[entry]
            if entry in self._failures:
                raise self._again(entry)
            if entry.version == LOCAL_VERSION:
                self._loaded[entry] = self._local.get(entry)
                return self._loaded[entry]
            try:
                self._loaded[entry] = loading.load(entry)
            except loading.ImportFailed as failed:
                raise self._fail(entry, "broken", str(failed)) from failed.__cause__
            except loading.RuleViolated as violated:
                whole = violated.whole_distribution
                raise self._fail(entry, "rejected", str(violated), whole=whole) from violated.__cause__
            return self._loaded[entry]

    def _fail(self, entry: Entry, state: State, reason: str, *, whole: bool = False) -> PluginError:
        """Remember that ``entry`` (or all of its distribution) cannot be used, and why."""
        plugin = self._installed.get(entry.distribution)
        name = entry.distribution
        remedy = f"pip install --upgrade --force-reinstall {name}, or SLAPO_DISABLE_PLUGINS={name}"
        if plugin is not None:
            failed = replace(plugin, state=state, reason=f"{noun(entry.kind)} '{entry.name}': {reason}", remedy=remedy)
            self._installed[plugin.name] = failed
            if whole:
                self._loaded = {key: value for key, value in self._loaded.items() if key.distribution != plugin.name}
        done = "could not be imported" if state == "broken" else "was rejected"
        message = f"{noun(entry.kind)} '{entry.name}' of {entry.label} ({entry.value}) {done}: {reason}"
        error_type = BrokenPluginError if state == "broken" else RejectedPluginError
        error = error_type(message, plugin=entry.label, hint=remedy)
        hit: Iterable[Entry] = plugin.entries if whole and plugin is not None else (entry,)
        self._failures.update(dict.fromkeys(hit, error))
        return error

    def _again(self, entry: Entry) -> PluginError:
        """The error of an earlier failure, fresh: an exception raised twice would grow its traceback."""
        first = self._failures[entry]
        error = type(first)(first.message, plugin=first.plugin, hint=first.hint)
        error.__cause__ = first.__cause__
        return error

    def _entry_of(self, cls: type) -> Entry | None:
        for entry, loaded in self._loaded.items():
            if loaded is cls:
                return entry
        name, top = getattr(cls, "name", None), cls.__module__.partition(".")[0]
        for plugin in self.plugins:
            for entry in plugin.entries:
                if entry.name == name and entry.value.partition(":")[0].partition(".")[0] == top:
                    return entry
        return None
