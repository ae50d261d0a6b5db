"""From what lies on disk to the state of every plugin: the rules, in the order in which they are checked.

disabled -> broken -> incompatible -> rejected -> conflict -> ok. A breach of a rule of names rejects the whole
distribution; the same full name from two distributions takes only that name out of use.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from slapo_core.plugins import compat
from slapo_core.plugins.config import DISABLE, Settings, close_matches
from slapo_core.plugins.metadata import Found, RawEntry
from slapo_core.plugins.model import Entry, Plugin, State, noun
from slapo_core.spec.kinds import KINDS, group_name
from slapo_core.spec.reserved import (
    CORE_DISTRIBUTION,
    FIRST_PARTY_NAMESPACES,
    RESERVED_NAMES,
    RESERVED_UNQUALIFIED,
    is_identifier,
    split_name,
)

__all__ = ["check_entry", "find_conflicts", "judge", "judge_all"]

_OBJECT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")


def judge_all(found: Iterable[Found], settings: Settings, *, api_major: int, core: str | None) -> tuple[Plugin, ...]:
    """The state of every distribution found, each alone and then against the others; sorted by name."""
    plugins = [judge(item, settings, api_major=api_major, core=core) for item in found]
    plugins = _keep_core_names(plugins)
    conflicts = find_conflicts(entry for plugin in plugins if plugin.usable for entry in plugin.entries)
    return tuple(sorted((_mark_conflicts(plugin, conflicts) for plugin in plugins), key=lambda plugin: plugin.name))


def judge(found: Found, settings: Settings, *, api_major: int, core: str | None) -> Plugin:
    """The state of one distribution, as far as it depends on itself and the settings."""
    raw, majors = _select(found.entries, api_major)
    entries = tuple(
        sorted((_entry(found, kind, item) for kind, item in raw), key=lambda entry: (entry.kind, entry.name))
    )

    def plugin(state: State, reason: str | None = None, remedy: str | None = None) -> Plugin:
        return Plugin(found.name, found.version, state, reason, remedy, found.source, entries, found.shadows)

    switched_off = settings.switched_off(found.name)
    if switched_off is not None:
        return plugin("disabled", switched_off, _switch_on(found.name, settings))
    if found.error is not None:
        return plugin("broken", found.error, f"pip install --force-reinstall {found.name}")
    misfit = compat.check_majors(majors, plugin=found.name, api_major=api_major, core=core)
    misfit = misfit or compat.check_requirement(found.requires, plugin=found.name, core=core)
    if misfit is not None:
        return plugin("broken" if misfit.malformed else "incompatible", misfit.reason, misfit.remedy)
    breach = _breach(found, entries)
    if breach is not None:
        return plugin("rejected", breach, f"report it to the author of {found.name}; pip uninstall {found.name}")
    unknown = sorted({entry.kind for entry in entries} - set(KINDS))
    if unknown:
        newer = f"provides {', '.join(unknown)}, which this slapo-core does not know and ignores"
        return plugin("ok", newer, f"pip install --upgrade {CORE_DISTRIBUTION}")
    return plugin("ok")


def check_entry(entry: Entry) -> str | None:
    """Why a name may not be provided by its distribution; None if it may."""
    kind = KINDS.get(entry.kind)
    if kind is None:
        return None
    if not kind.namespaced:
        if not is_identifier(entry.name):
            return f"{noun(entry.kind)} name {entry.name!r} must be a lowercase identifier"
        owners = RESERVED_UNQUALIFIED.get(kind.name, {}).get(entry.name)
        if owners is not None and entry.distribution not in owners:
            return f"{noun(entry.kind)} name '{entry.name}' is reserved for {owners[0]}"
        return None
    parts = split_name(entry.name)
    if parts is None:
        return f"{noun(entry.kind)} name {entry.name!r} must be '<namespace>.<name>' in lowercase identifiers"
    namespace, bare = parts
    owners = FIRST_PARTY_NAMESPACES.get(namespace)
    if owners is not None and entry.distribution not in owners:
        return f"namespace '{namespace}' of '{entry.name}' is reserved for {owners[0]}"
    if bare in RESERVED_NAMES:
        return f"'{entry.name}' is refused: '{bare}' would hide a member of nodes or schedules"
    return None


def find_conflicts(entries: Iterable[Entry]) -> dict[tuple[str, str], tuple[str, ...]]:
    """The distributions behind every ``(kind, full name)`` that more than one of them provides."""
    providers: dict[tuple[str, str], set[str]] = defaultdict(set)
    for entry in entries:
        if entry.kind != "hooks":
            providers[entry.kind, entry.name].add(entry.distribution)
    return {key: tuple(sorted(names)) for key, names in providers.items() if len(names) > 1}


def _select(entries: Sequence[RawEntry], api_major: int) -> tuple[list[tuple[str, RawEntry]], list[int]]:
    """The entries of the newest readable API major with their kind, and every major declared.

    Groups that are not of the form ``slapo.v<major>.<kind>`` come back with the group as kind, to be rejected.
    """
    parsed = [(compat.parse_group(entry.group), entry) for entry in entries]
    majors = [group[0] for group, _ in parsed if group is not None]
    readable = [major for major in compat.readable_majors(api_major) if major in majors] or sorted(set(majors))[-1:]
    chosen = [(group[1], entry) for group, entry in parsed if group is not None and group[0] in readable[:1]]
    chosen += [(entry.group, entry) for group, entry in parsed if group is None]
    return chosen, majors


def _entry(found: Found, kind: str, raw: RawEntry) -> Entry:
    namespaced = kind in KINDS and KINDS[kind].namespaced
    bare = raw.name.rpartition(".")[2] if namespaced else raw.name
    return Entry(kind, raw.name, bare, raw.value, found.name, found.version or "(unknown version)")


def _breach(found: Found, entries: Sequence[Entry]) -> str | None:
    """The first rule that the distribution's declarations break; None if they keep them all."""
    for raw in found.entries:
        if compat.parse_group(raw.group) is None:
            kind = (close_matches(raw.group.rpartition(".")[2], KINDS) or ["primitives"])[0]
            return f"group '{raw.group}' is not of the form 'slapo.v<major>.<kind>'; it should be '{group_name(kind)}'"
    for entry in entries:
        misspelt = close_matches(entry.kind, KINDS) if entry.kind not in KINDS else []
        if misspelt:
            return f"there is no kind '{entry.kind}'; did you mean '{misspelt[0]}'?"
        problem = _value_problem(entry) or check_entry(entry)
        if problem is not None:
            return problem
    for (kind_name, name), count in Counter((entry.kind, entry.name) for entry in entries).items():
        if count > 1:
            return f"{noun(kind_name)} name '{name}' is declared {count} times"
    namespaces = sorted({entry.namespace for entry in entries if entry.kind in KINDS and entry.namespace})
    if len(namespaces) > 1:
        return f"names in {len(namespaces)} namespaces ({', '.join(namespaces)}); a distribution has one"
    if sum(entry.kind == "hooks" for entry in entries) > 1:
        return "more than one hooks module; a distribution has at most one"
    return None


def _value_problem(entry: Entry) -> str | None:
    pattern, form = (_MODULE, "package.module") if entry.kind == "hooks" else (_OBJECT, "package.module:Class")
    if entry.kind not in KINDS or pattern.match(entry.value):
        return None
    return f"{noun(entry.kind)} '{entry.name}' points to {entry.value!r}, which is not of the form '{form}'"


def _switch_on(name: str, settings: Settings) -> str:
    return f"remove {name} from {DISABLE}" if name in settings.disabled else f"add {name} to SLAPO_PLUGINS"


def _keep_core_names(plugins: Sequence[Plugin]) -> list[Plugin]:
    """Reject whoever provides a name of slapo-core's own: core's stays usable whatever is installed."""
    core = {
        (entry.kind, entry.name) for plugin in plugins if plugin.name == CORE_DISTRIBUTION for entry in plugin.entries
    }

    def check(plugin: Plugin) -> Plugin:
        taken = [entry for entry in plugin.entries if (entry.kind, entry.name) in core and entry.kind != "hooks"]
        if plugin.name == CORE_DISTRIBUTION or plugin.state != "ok" or not taken:
            return plugin
        reason = f"{noun(taken[0].kind)} name '{taken[0].name}' belongs to {CORE_DISTRIBUTION}"
        remedy = f"report it to the author of {plugin.name}; pip uninstall {plugin.name}"
        return replace(plugin, state="rejected", reason=reason, remedy=remedy)

    return [check(plugin) for plugin in plugins]


def _mark_conflicts(plugin: Plugin, conflicts: dict[tuple[str, str], tuple[str, ...]]) -> Plugin:
    mine = [(entry.kind, entry.name) for entry in plugin.entries if (entry.kind, entry.name) in conflicts]
    if plugin.state != "ok" or not mine:
        return plugin
    others = sorted({other for key in mine for other in conflicts[key]} - {plugin.name})
    names = ", ".join(f"'{name}'" for _, name in mine)
    reason = f"{names} also provided by {', '.join(others)}; its other names work"
    remedy = f"uninstall or disable one: {DISABLE}={plugin.name} or {DISABLE}={','.join(others)}"
    return replace(plugin, state="conflict", reason=reason, remedy=remedy)
