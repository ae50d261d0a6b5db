"""Read the installed distributions with their entries and states, without imports."""

from __future__ import annotations

import difflib
import functools
import keyword
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

from packaging.utils import canonicalize_name

import slapo_core
from slapo_core.errors import UnusablePluginError

if TYPE_CHECKING:
    from importlib_metadata import IDistribution


GROUP_PREFIX = "slapo.v1."
CORE_DISTRIBUTION = "slapo-core"
FIRST_PARTY: tuple[str, ...] = slapo_core.DISTRIBUTIONS


@dataclass(frozen=True)
class Kind:
    """A kind of entry.

    Args:
        base: ``"module:Class"`` that its objects are subclasses of; a type of modules or functions, that they are
            instances of; None for text that is never imported.
        namespaced: whether names must be ``<namespace>.<name>``, of which ``<name>`` alone may be used.
        classes: whether names are ``<package>.<Class>``, of the classes of any library, which have no owner.
    """

    base: str | None = "builtins:object"
    namespaced: bool = False
    classes: bool = False

    @classmethod
    def declared(cls, value: str) -> Kind:
        """The kind of an entry point's value, e.g. ``"acme.sums:Sum"`` or ``"acme.sums:Sum [namespaced]"``."""
        base, _, extras = value.partition("[")
        return cls(base.strip(), namespaced=extras in ("namespaced]", "classes]"), classes=extras == "classes]")


KINDS: dict[str, Kind] = {
    "primitives": Kind("slapo_core.primitive:Primitive", namespaced=True),
    "dialects": Kind("slapo_core.dialect:Dialect"),
    "commands": Kind("slapo_core.cli.main:Command"),
    "queries": Kind("types:FunctionType"),  # of a node, nodes or a schedule; leave no record
    "selectors": Kind("slapo_core.primitive:Selector"),  # what users write for a part of a module
    "codecs": Kind("slapo_core.schedule.records:Codec"),  # values in saved schedules
    "guards": Kind(),  # of live models: told of each step
    "hooks": Kind("types:ModuleType"),
    "hookspecs": Kind("types:ModuleType"),  # further hooks, known before any hooks module is loaded
    "kinds": Kind(None),  # further kinds, each with the base class of its objects
    "renamed": Kind(None),  # former name of a primitive -> its name
}
"""The kinds of core, by entry-point group; distributions declare others under ``slapo.v1.kinds``."""

CORE_COMMANDS = (
    *("dialects", "diff", "doctor", "explain", "plugins", "primitives", "stubs"),
    *("plugins.list", "plugins.show"),
)
"""Words of the command line that no plugin may take."""

MEMBERS = frozenset(
    (
        *("aliases", "apply", "buffers", "changed_attributes", "children", "document", "example_inputs", "explain"),
        *("forward_is_replaced", "hooks", "is_sealed", "is_verified", "layout", "mesh", "model", "module", "nodes"),
        *("parameters", "parent", "path", "pattern", "plugin", "records", "records_below", "reference", "rewound"),
        *("root", "runs_own_forward", "schedule", "seal", "state", "ties", "to_json", "undo", "walk", "wrappers"),
    )
)
"""Members of `Node`, `NodeGroup` and `Schedule`, which no primitive, namespace or query may be named."""

_FREELY_NAMED = ("hooks", "hookspecs", "renamed")
_OF_CORE = {("commands", name) for name in CORE_COMMANDS}
_IDENTIFIER = re.compile(r"[a-z][a-z0-9_]*\Z")

DISABLE = "SLAPO_DISABLE_PLUGINS"

LOCAL_VERSION = "local"
"""The version of everything registered in this process."""

State = Literal["ok", "unusable", "conflict", "disabled"]

_IN_WORDS = {"unusable": "is unusable", "conflict": "is in conflict", "disabled": "is installed but disabled"}


@dataclass(frozen=True)
class Entry:
    """One name that one distribution provides.

    Args:
        kind: e.g. ``"primitives"``.
        name: the full name, e.g. ``"tp.shard"``.
        value: where the object is, e.g. ``"acme_slapo.pad:Pad"``.
        distribution: e.g. ``"acme-slapo"``.
        version: e.g. ``"0.1.0"``; ``"local"`` if registered in this process.
    """

    kind: str
    name: str
    value: str
    distribution: str
    version: str

    @property
    def bare(self) -> str:
        """``"shard"`` of ``"tp.shard"``; of a name without namespace the name itself."""
        return self.name.rpartition(".")[2]

    @property
    def namespace(self) -> str | None:
        """``"tp"`` of ``"tp.shard"``; None of a name without."""
        return self.name.partition(".")[0] if "." in self.name else None

    @property
    def label(self) -> str:
        """The distribution with its version, e.g. ``"acme-slapo 1.0"``."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class Plugin:
    """One installed distribution that provides something to slapo.

    Args:
        name: canonical, e.g. ``"acme-slapo"``.
        version: None where its metadata cannot be read.
        state: ``ok``, ``unusable``, ``conflict`` or ``disabled``.
        reason: why it is not ok, or which of its hooks modules are disabled; else None.
        remedy: what to do about the reason.
        source: its metadata directory, or ``"this process"``.
        entries: its readable entry points, sorted.
        lost: the ``entries`` that cannot be used because another distribution provides the same name.
        summary: one line about the distribution, of its metadata; None where there is none.
        disabled: hooks modules that ``SLAPO_DISABLE_PLUGINS`` names, as ``acme-slapo:acme.liveness``; not in
            ``entries``.
    """

    name: str
    version: str | None
    state: State = "ok"
    reason: str | None = None
    remedy: str | None = None
    source: str = ""
    entries: tuple[Entry, ...] = ()
    lost: tuple[Entry, ...] = ()
    summary: str | None = None
    disabled: tuple[Entry, ...] = ()

    def provides(self, kind: str) -> tuple[str, ...]:
        """The full names of one kind that it provides, sorted."""
        return tuple(sorted({entry.name for entry in self.entries if entry.kind == kind}))

    @property
    def label(self) -> str:
        """The distribution with its version, e.g. ``"acme-slapo 1.0"``."""
        return f"{self.name} {self.version}" if self.version else self.name

    @property
    def usable(self) -> bool:
        """Whether its names can be used; in ``conflict``, all but those that are lost."""
        return self.state in ("ok", "conflict")

    def error(self, subject: str, *, path: str | None = None) -> UnusablePluginError:
        """The error of its state, which is not ``ok``.

        Args:
            subject: the requested name, the beginning of the message.
            path: the node where it was asked for.
        """
        message = f"{subject} {_IN_WORDS[self.state]}: {self.reason}"
        return UnusablePluginError(message, state=self.state, path=path, plugin=self.label, hint=self.remedy)


def noun(kind: str) -> str:
    """Return the singular of a kind, for messages: ``"primitive"`` of ``"primitives"``."""
    if kind in ("hooks", "hookspecs"):
        return f"{kind} module"
    return {"losses": "loss", "queries": "query"}.get(kind, kind.removesuffix("s"))


def is_identifier(text: str) -> bool:
    """Whether ``text`` is a lowercase identifier that can be written after a dot: ``"shard"``, ``"fork_rng"``."""
    return _IDENTIFIER.match(text) is not None and not keyword.iskeyword(text)


def split_name(name: str) -> tuple[str, str] | None:
    """``"tp.shard"`` as ``("tp", "shard")``; None if it is not ``<namespace>.<name>`` in lowercase identifiers."""
    namespace, dot, bare = name.partition(".")
    return (namespace, bare) if dot and is_identifier(namespace) and is_identifier(bare) else None


def owner_of(name: str, kind: str = "primitives") -> str:
    """The distribution that a name belongs to: ``"slapo-acme"`` for ``"acme"`` and ``"acme.pad"``."""
    namespace = name.partition(".")[0]
    rule = CORE_DISTRIBUTION if namespace == "slapo" else f"slapo-{namespace.replace('_', '-')}"
    return CORE_DISTRIBUTION if (kind, name) in _OF_CORE else slapo_core.OWNERS.get((kind, name), rule)


def read_plugins(
    path: Sequence[str] | None = None, *, disabled: Collection[str] = (), core: str | None = None
) -> tuple[Plugin, ...]:
    """Read the installed distributions of the project or with entry points ``slapo.*``, sorted.

    What cannot be read becomes the reason of a plugin that is unusable; nothing is imported, and nothing raises.

    Args:
        path: directories to search, like ``sys.path``, which is the default. The first directory that has a
            distribution wins, as it does for ``import``.
        disabled: canonical names of distributions, or ``<distribution>:<hooks module>``, that are not to be used.
        core: the version of slapo-core that requirements are compared with; None compares none.
    """
    from importlib_metadata import distributions

    found: dict[str, Plugin] = {}
    seen = set()
    for distribution in distributions(path=list(sys.path if path is None else path)):
        name, source = _identity(distribution)
        plugin = _read(name, source, distribution, core) if name not in seen else None
        if plugin is not None:
            found[name] = plugin
        seen.add(name)
    kinds = known_kinds(found.values())
    plugins = [_judge(plugin, found, disabled, kinds) for plugin in found.values()]
    return tuple(sorted(_with_conflicts(plugins), key=lambda plugin: plugin.name))


def known_kinds(plugins: Iterable[Plugin]) -> dict[str, Kind]:
    """Return the kinds of core and of distributions; the project's own declaration of a kind wins."""
    declared = [entry for plugin in plugins for entry in plugin.entries if entry.kind == "kinds"]
    declared.sort(key=lambda entry: entry.distribution in FIRST_PARTY)
    return {**{entry.name: Kind.declared(entry.value) for entry in declared}, **KINDS}


@functools.cache
def core_version() -> str | None:
    """Return the version of the installed slapo-core; None in a bare source tree."""
    from importlib_metadata import PackageNotFoundError, version

    try:
        return version(CORE_DISTRIBUTION)
    except PackageNotFoundError:
        return None


def core_requirements() -> tuple[str, ...]:
    """Return the requirements of the installed slapo-core, e.g. ``("torch>=2.11", ...)``; empty for a source tree."""
    from importlib_metadata import PackageNotFoundError, requires

    try:
        return tuple(requires(CORE_DISTRIBUTION) or ())
    except PackageNotFoundError:
        return ()


def close_matches(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> list[str]:
    """Return up to three close matches of a misspelled name, best first."""
    return difflib.get_close_matches(name, sorted(known), n=3, cutoff=cutoff)


def name_violation(entry: Entry, installed: Collection[str] = (), kinds: Mapping[str, Kind] = KINDS) -> str | None:
    """Return why a distribution may not provide a name; None if it may.

    A kind that no installed distribution declares is left alone, unless it is a misspelling.

    Args:
        entry: the name.
        installed: further distributions that own their namespaces, besides the project's.
        kinds: by name, of core and declared by distributions.
    """
    if entry.kind in _FREELY_NAMED:
        return None
    if entry.kind not in kinds:
        close = close_matches(entry.kind.rpartition(".")[2], kinds, cutoff=0.8)
        if is_identifier(entry.kind) and not close:
            return None
        group = entry.kind if entry.kind.startswith("slapo.") else GROUP_PREFIX + entry.kind
        return f"unknown entry-point group '{group}'; did you mean '{GROUP_PREFIX}{(close or ['primitives'])[0]}'?"
    parts, namespaced = entry.name.split("."), kinds[entry.kind].namespaced
    if kinds[entry.kind].classes:
        is_formed = len(parts) == 2 and all(map(str.isidentifier, parts))
        return None if is_formed else f"{noun(entry.kind)} name {entry.name!r} must be '<package>.<Class>'"
    expected = "'<namespace>.<name>' in lowercase identifiers" if namespaced else "a lowercase identifier"
    is_formed = all(map(is_identifier, parts)) and len(parts) <= 2 and (len(parts) == 2 or not namespaced)
    if entry.kind == "commands" and len(parts) == 2 and parts[0] != "plugins":
        is_formed, expected = False, f"{expected}, or 'plugins.<name>'"
    if not is_formed:
        return f"{noun(entry.kind)} name {entry.name!r} must be {expected}"
    taken = MEMBERS.intersection(parts) if entry.kind in ("primitives", "queries") else ()
    if taken:
        return (
            f"{noun(entry.kind)} '{entry.name}': '{min(taken)}' is a member of nodes and schedules, choose another name"
        )
    owner = owner_of(entry.name, entry.kind)
    if entry.kind == "queries" and owner not in FIRST_PARTY:
        owner = owner_of(entry.name)  # that of a primitive is taken, too
    if owner != entry.distribution and (owner in FIRST_PARTY or owner in installed):
        what = f"namespace '{parts[0]}' of {noun(entry.kind)}" if namespaced else noun(entry.kind)
        return f"{what} '{entry.name}' belongs to {owner}"
    return None


def _identity(distribution: IDistribution) -> tuple[str, str]:
    """Read a distribution's canonical name and place from its directory's name, not from METADATA."""
    place = getattr(distribution, "_path", None)
    if place is None:  # from a custom finder, which has no directory
        return canonicalize_name(distribution.name), f"{type(distribution).__module__} finder"
    stem = PurePath(str(place)).name.rpartition(".")[0]
    return canonicalize_name(stem.partition("-")[0]), str(place)


def _read(name: str, source: str, distribution: IDistribution, core: str | None) -> Plugin | None:
    """Read one distribution as a plugin; None if it provides nothing to slapo."""
    version, entries, needs, reading = None, [], None, "entry_points.txt"
    try:
        text = distribution.read_text("entry_points.txt")
        if (not text or "[slapo." not in text) and name not in FIRST_PARTY:
            return None
        reading = "METADATA"
        metadata = distribution.metadata
        if "Version" not in metadata:
            raise ValueError("it has no Version")
        version = metadata["Version"]
        needs = _unmet_requirement(distribution, core)
        reading = "entry_points.txt"
        for point in distribution.entry_points:
            if point.group.startswith("slapo."):
                entries.append(Entry(point.group.removeprefix(GROUP_PREFIX), point.name, point.value, name, version))
    except Exception as error:  # noqa: BLE001 - absent, not UTF-8, malformed: raised as it comes
        if reading == "entry_points.txt" and isinstance(error, UnicodeDecodeError) and b"[slapo." not in error.object:
            return None
        reason = f"{reading} cannot be read: {type(error).__name__}: {error}"
        return Plugin(name, version, "unusable", reason, f"pip install --force-reinstall {name}", source)
    provided = tuple(sorted(entries, key=lambda entry: (entry.kind, entry.name)))
    if needs is not None:
        reason = f"needs {needs}; installed is {CORE_DISTRIBUTION} {core}"
        remedy = f'pip install "{needs}", or a release of {name} for this version'
        return Plugin(name, version, "unusable", reason, remedy, source, provided)
    return Plugin(name, version, source=source, entries=provided, summary=metadata.get("Summary"))


def _unmet_requirement(distribution: IDistribution, core: str | None) -> str | None:
    """Return the requirement on slapo-core if ``core`` does not satisfy it."""
    lines = [line for line in distribution.requires or () if "slapo" in line.lower()]
    if core is None or not lines:
        return None
    from packaging.requirements import Requirement  # slow to import

    for requirement in map(Requirement, lines):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        is_met = requirement.specifier.contains(core, prereleases=True)
        if applies and canonicalize_name(requirement.name) == CORE_DISTRIBUTION and not is_met:
            return f"{CORE_DISTRIBUTION}{requirement.specifier}"
    return None


def _judge(plugin: Plugin, installed: Collection[str], disabled: Collection[str], kinds: Mapping[str, Kind]) -> Plugin:
    """Set a plugin's state: disabled by the user, or unusable by a rule for names."""
    if plugin.name in disabled:
        remedy = f"remove {plugin.name} from {DISABLE}"
        return replace(plugin, state="disabled", reason=f"{DISABLE} names it", remedy=remedy)
    violations = filter(None, (name_violation(entry, installed, kinds) for entry in plugin.entries))
    violation = next(violations, None) if plugin.usable else None
    if violation is None:
        return _without_disabled_hooks(plugin, disabled) if plugin.usable else plugin
    remedy = f"report it to the author of {plugin.name}; pip uninstall {plugin.name}"
    return replace(plugin, state="unusable", reason=violation, remedy=remedy)


def _without_disabled_hooks(plugin: Plugin, disabled: Collection[str]) -> Plugin:
    hooks = {f"{plugin.name}:{entry.name}": entry for entry in plugin.entries if entry.kind == "hooks"}
    off = {name: entry for name, entry in hooks.items() if name in disabled}
    if not off:
        return plugin
    named = " and ".join(off)
    entries = tuple(entry for entry in plugin.entries if entry not in off.values())
    reason, remedy = f"{DISABLE} names {named}", f"remove {named} from {DISABLE}"
    return replace(plugin, entries=entries, disabled=tuple(off.values()), reason=reason, remedy=remedy)


def _with_conflicts(plugins: Sequence[Plugin]) -> Iterator[Plugin]:
    """Mark full names that two distributions provide as conflicts, unless one is first-party."""
    providers: dict[tuple[str, str], dict[str, Plugin]] = defaultdict(dict)
    for plugin in plugins:
        for entry in plugin.entries if plugin.usable else ():
            if entry.kind not in ("hooks", "hookspecs"):
                providers[entry.kind, entry.name][plugin.name] = plugin
    for plugin in plugins:
        lost = [entry for entry in plugin.entries if plugin.usable and len(providers[entry.kind, entry.name]) > 1]
        if not lost or plugin.name in FIRST_PARTY:
            yield plugin
            continue
        rivals = sorted({name for entry in lost for name in providers[entry.kind, entry.name]})
        reasons = (_conflict(entry.name, providers[entry.kind, entry.name]) for entry in lost)
        remedy = f"uninstall one of them, or disable it: {' or '.join(f'{DISABLE}={name}' for name in rivals)}"
        yield replace(plugin, state="conflict", reason="; ".join(reasons), remedy=remedy, lost=tuple(lost))


def _conflict(name: str, providers: Mapping[str, Plugin]) -> str:
    labels = " and ".join(providers[distribution].label for distribution in sorted(providers))
    kept = next((distribution for distribution in providers if distribution in FIRST_PARTY), None)
    return f"'{name}' is provided by {labels}; {'neither is used' if kept is None else f'{kept} keeps it'}"
