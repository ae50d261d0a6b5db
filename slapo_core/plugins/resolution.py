"""What a name means: bare or full, unique, ambiguous, unusable or unknown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from slapo_core.errors import AmbiguousNameError, ConflictingPluginError, UnknownNameError
from slapo_core.plugins.config import DISABLE, close_matches
from slapo_core.plugins.model import Entry, Plugin, core_label, noun
from slapo_core.plugins.rules import find_conflicts
from slapo_core.spec.kinds import KINDS, PLANNED_KINDS
from slapo_core.spec.reserved import FIRST_PARTY_NAMES, PLANNED_PRIMITIVES, RESERVED_DIALECTS, RESERVED_NAMESPACES

__all__ = ["NameIndex"]


class NameIndex:
    """All names of a set of plugins. A value: it is made anew when the plugins change.

    Args:
        plugins: every plugin, whatever its state.
        prefer: distributions that win where a bare name is ambiguous, in order.
        core: the version of slapo-core, for messages.
    """

    def __init__(self, plugins: Sequence[Plugin], *, prefer: Sequence[str], core: str | None) -> None:
        self._core = core
        self._plugins = {plugin.name: plugin for plugin in plugins}
        self._prefer = tuple(prefer)
        known = [(plugin, entry) for plugin in plugins for entry in plugin.entries if entry.kind in KINDS]
        usable = [entry for plugin, entry in known if plugin.usable]
        self._conflicts = find_conflicts(usable)
        self._unusable = [entry for plugin, entry in known if not plugin.usable]
        self._by_full: dict[str, dict[str, Entry]] = defaultdict(dict)
        self._by_bare: dict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
        for entry in sorted(usable, key=lambda entry: (entry.name, entry.distribution)):
            self._by_full[entry.kind].setdefault(entry.name, entry)
            full = self._by_bare[entry.kind].get(entry.bare, ())
            self._by_bare[entry.kind][entry.bare] = full if entry.name in full else (*full, entry.name)
        self.namespaces = tuple(sorted({entry.namespace for entry in usable if entry.namespace}))

    def names(self, kind: str) -> tuple[str, ...]:
        """Full names that mean one thing, sorted."""
        return tuple(name for name in self._by_full.get(kind, {}) if (kind, name) not in self._conflicts)

    def unique(self, kind: str) -> Mapping[str, str]:
        """Bare names that mean one thing, sorted, and the full name of each."""
        decided = {bare: self._decide(kind, bare) for bare in sorted(self._by_bare.get(kind, {}))}
        return {bare: full for bare, full in decided.items() if full and (kind, full) not in self._conflicts}

    def ambiguous(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Bare names that mean several things: kind -> bare name -> full names."""
        found = {
            kind: {bare: full for bare, full in sorted(bares.items()) if self._decide(kind, bare) is None}
            for kind, bares in sorted(self._by_bare.items())
        }
        return {kind: bares for kind, bares in found.items() if bares}

    def resolve(self, kind: str, name: str, *, path: str | None = None) -> Entry:
        """The entry that ``name`` means; the errors are those of `Registry.resolve`."""
        self._refuse_kind(kind, path)
        if name in self._by_full.get(kind, {}):
            return self._admit_full(kind, name, path)
        if name in self._by_bare.get(kind, {}):
            full = self._decide(kind, name)
            if full is None:
                raise self._ambiguity(kind, name, path)
            return self._admit_full(kind, full, path)
        for entry in sorted(self._unusable, key=lambda entry: entry.distribution):
            if entry.kind == kind and name in (entry.name, entry.bare, entry.namespace):
                self._raise_unusable(entry, path)
        raise self._unknown(kind, name, path)

    def admit(self, entry: Entry) -> Entry:
        """``entry`` itself, if its plugin is usable and nobody else provides the same full name."""
        self._refuse_kind(entry.kind, None)
        plugin = self._plugins.get(entry.distribution)
        if plugin is None or entry not in plugin.entries:
            raise UnknownNameError(
                f"{entry.label} does not provide {noun(entry.kind)} '{entry.name}'", plugin=entry.label
            )
        if not plugin.usable:
            self._raise_unusable(entry, None)
        self._refuse_conflict(entry.kind, entry.name, None)
        return entry

    def _decide(self, kind: str, bare: str) -> str | None:
        """The full name that a bare one stands for; None if that is ambiguous."""
        full = self._by_bare[kind][bare]
        if KINDS[kind].namespaced and self._other_namespace(kind, bare):
            return None
        if len(full) == 1:
            return full[0]
        for distribution in self._prefer:
            for name in full:
                if self._by_full[kind][name].distribution == distribution:
                    return name
        return None

    def _other_namespace(self, kind: str, bare: str) -> bool:
        """Whether ``bare`` is also the namespace of somebody else: ``sch["x"].quant`` cannot be both."""
        return bare in self.namespaces and any(not name.startswith(f"{bare}.") for name in self._by_bare[kind][bare])

    def _refuse_kind(self, kind: str, path: str | None) -> None:
        if kind in PLANNED_KINDS:
            message = f"{core_label(self._core)} does not use plugins of kind '{kind}' yet"
            raise UnknownNameError(message, path=path, hint=f"it uses {_listed(list(KINDS))}")
        if kind not in KINDS:
            hint = f"did you mean {' or '.join(close_matches(kind, KINDS) or KINDS)}?"
            raise UnknownNameError(f"there is no kind of plugin object '{kind}'", path=path, hint=hint)

    def _admit_full(self, kind: str, name: str, path: str | None) -> Entry:
        self._refuse_conflict(kind, name, path)
        return self._by_full[kind][name]

    def _refuse_conflict(self, kind: str, name: str, path: str | None) -> None:
        providers = self._conflicts.get((kind, name))
        if providers is not None:
            labels = [self._plugins[provider].label for provider in providers]
            raise ConflictingPluginError(
                f"{noun(kind)} '{name}' is provided by {_listed(labels)}; neither is used",
                path=path,
                plugin=labels[0],
                hint=f"uninstall one of them, or disable it: {DISABLE}={providers[0]} or {DISABLE}={providers[-1]}",
            )

    def _raise_unusable(self, entry: Entry, path: str | None) -> None:
        plugin = self._plugins[entry.distribution]
        raise plugin.error(f"{noun(entry.kind)} '{entry.name}' of {plugin.label}", path=path)

    def _ambiguity(self, kind: str, bare: str, path: str | None) -> AmbiguousNameError:
        full = self._by_bare[kind][bare]
        entries = [self._by_full[kind][name] for name in full]
        exits = f"write the full name ('{full[0]}')"
        if len(full) == 1:
            message = f"{noun(kind)} name '{bare}' is both '{full[0]}' of {entries[0].label} and a namespace"
            return AmbiguousNameError(message, path=path, plugin=entries[0].label, hint=exits)
        listed = _listed([f"'{entry.name}' ({entry.label})" for entry in entries])
        first, last = entries[0].distribution, entries[-1].distribution
        return AmbiguousNameError(
            f"{noun(kind)} name '{bare}' is ambiguous: {listed}",
            path=path,
            plugin=entries[0].label,
            hint=f'{exits}, set [tool.slapo] prefer = ["{first}"] in pyproject.toml, or disable one ({DISABLE}={last})',
        )

    def _unknown(self, kind: str, name: str, path: str | None) -> UnknownNameError:
        message = f"no installed plugin provides {noun(kind)} '{name}'"
        namespace, _, bare = name.rpartition(".")
        reserved = {"primitives": RESERVED_NAMESPACES.get(namespace or name), "dialects": RESERVED_DIALECTS.get(name)}
        owner = reserved.get(kind) or _first_party_owner(kind, name)
        if owner in FIRST_PARTY_NAMES and owner not in self._plugins:
            return UnknownNameError(
                f"{message}; it is part of {owner}", path=path, plugin=owner, hint=f"pip install {owner}"
            )
        if owner is not None and owner not in FIRST_PARTY_NAMES:
            what = f"the namespace '{namespace or name}'" if kind == "primitives" else "the name"
            message += f"; {what} is reserved and not available in this version"
        elif kind == "primitives" and name in PLANNED_PRIMITIVES:
            message += "; it is not available in this version"
        unread = [plugin.name for plugin in self._plugins.values() if plugin.state == "broken" and not plugin.entries]
        if unread:
            message += f" (what {_listed(unread)} would provide is unknown: broken)"
        known = {*self._by_full.get(kind, {}), *self._by_bare.get(kind, {})}
        close = close_matches(name, known) or close_matches(bare, known)
        hint = f"did you mean {' or '.join(repr(item) for item in close)}?" if close else _command(kind)
        return UnknownNameError(message, path=path, hint=hint)


def _first_party_owner(kind: str, bare: str) -> str | None:
    """The distribution of the project that provides a bare name."""
    owners = (distribution for distribution, names in FIRST_PARTY_NAMES.items() if bare in names.get(kind, ()))
    return next(owners, None)


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _command(kind: str) -> str:
    own = {"primitives": "primitives", "dialects": "dialects", "patterns": "patterns list"}
    command = own.get(kind, f"plugins list --kind {kind}")
    return f"`slapo {command}` shows what is installed"
