"""From what lies on disk to the state of every plugin: the rules, in the order in which they are checked.

disabled -> broken -> incompatible -> rejected -> conflict -> ok. A violation of a rule of names rejects the whole
distribution; the same full name from two distributions takes only that name out of use.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from slapo_core.plugins import compat
from slapo_core.plugins.config import DISABLE, Settings, close_matches
from slapo_core.plugins.metadata import Found
from slapo_core.plugins.model import Entry, Plugin, State, core_label, noun
from slapo_core.spec.kinds import API_MAJOR, KINDS, PLANNED_KINDS
from slapo_core.spec.reserved import (
    CORE_DISTRIBUTION,
    RESERVED_COMMANDS,
    RESERVED_DIALECTS,
    RESERVED_NAMES,
    RESERVED_NAMESPACES,
    RESERVED_SAMPLERS,
    RESERVED_TRACERS,
    is_identifier,
    split_name,
)

__all__ = ["find_conflicts", "judge_all", "name_violation"]

_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_OBJECT = re.compile(rf"{_DOTTED}:{_DOTTED}\Z")
_MODULE = re.compile(rf"{_DOTTED}\Z")


def judge_all(found: Iterable[Found], settings: Settings, *, api_major: int, core: str | None) -> tuple[Plugin, ...]:
    """The state of every distribution found, each alone and then against the others; sorted by name."""
    plugins = [_judge(item, settings, api_major=api_major, core=core) for item in found]
    conflicts = find_conflicts(entry for plugin in plugins if plugin.usable for entry in plugin.entries)
    return tuple(sorted((_mark_conflicts(plugin, conflicts) for plugin in plugins), key=lambda plugin: plugin.name))


def name_violation(entry: Entry) -> str | None:
    """Why a name may not be provided by its distribution; None if it may."""
    kind = KINDS.get(entry.kind)
    if kind is None:
        return None
    if not kind.namespaced:
        family = split_name(entry.name) if kind.dotted else None
        if family is None and not is_identifier(entry.name):
            dotted = ", or '<family>.<name>' of two of them" if kind.dotted else ""
            return f"{noun(entry.kind)} name {entry.name!r} must be a lowercase identifier{dotted}"
        reserved = {
            "commands": RESERVED_COMMANDS,
            "dialects": RESERVED_DIALECTS,
            "hooks": RESERVED_NAMESPACES,
            "samplers": RESERVED_SAMPLERS,
            "tracers": RESERVED_TRACERS,
        }
        owner = reserved.get(entry.kind, {}).get(family[0] if family else entry.name)
        if owner not in (None, entry.distribution):
            return f"{noun(entry.kind)} name '{entry.name}' is reserved for {owner}"
        return None
    parts = split_name(entry.name)
    if parts is None:
        return f"{noun(entry.kind)} name {entry.name!r} must be '<namespace>.<name>' in lowercase identifiers"
    namespace, bare = parts
    owner = RESERVED_NAMESPACES.get(namespace)
    if owner not in (None, entry.distribution):
        return f"namespace '{namespace}' of '{entry.name}' is reserved for {owner}"
    if bare in RESERVED_NAMES:
        return f"'{entry.name}' is refused: '{bare}' would hide a member of nodes or schedules"
    return None


def find_conflicts(entries: Iterable[Entry]) -> dict[tuple[str, str], tuple[str, ...]]:
    """The distributions behind every ``(kind, full name)`` that more than one of them provides."""
    providers: dict[tuple[str, str], set[str]] = defaultdict(set)
    for entry in entries:
        if entry.kind in KINDS and entry.kind != "hooks":
            providers[entry.kind, entry.name].add(entry.distribution)
    return {key: tuple(sorted(names)) for key, names in providers.items() if len(names) > 1}


def _judge(found: Found, settings: Settings, *, api_major: int, core: str | None) -> Plugin:
    """The state of one distribution, as far as it depends on itself and the settings."""
    entries, majors = _select(found, api_major)

    def plugin(state: State, reason: str | None = None, remedy: str | None = None) -> Plugin:
        return Plugin(found.name, found.version, state, reason, remedy, found.source, entries, found.shadows)

    switched_off = settings.switched_off(found.name)
    if switched_off is not None:
        return plugin("disabled", *switched_off)
    if found.error is not None:
        return plugin("broken", found.error, f"pip install --force-reinstall {found.name}")
    verdict = compat.check_majors(majors, plugin=found.name, api_major=api_major, core=core)
    verdict = verdict or compat.check_requirement(found.requires, plugin=found.name, core=core)
    if verdict is not None:
        return plugin(*verdict)
    violation = next(_violations(entries), None)
    if violation is not None:
        return plugin("rejected", violation, f"report it to the author of {found.name}; pip uninstall {found.name}")
    unused = sorted({entry.kind for entry in entries} - set(KINDS))
    if unused:
        remark = f"provides {', '.join(unused)}, which {core_label(core)} does not use yet"
        is_newer = not set(unused) <= set(PLANNED_KINDS)
        return plugin("ok", remark, f"pip install --upgrade {CORE_DISTRIBUTION}" if is_newer else None)
    return plugin("ok")


def _select(found: Found, api_major: int) -> tuple[tuple[Entry, ...], list[int]]:
    """The entries of the newest readable API major, sorted, and every major declared.

    Groups that are not of the form ``slapo.v<major>.<kind>`` come back with the group as kind, to be rejected.
    """
    parsed = [(compat.parse_group(point.group), point) for point in found.entries]
    majors = [group[0] for group, _ in parsed if group is not None]
    readable = [major for major in compat.readable_majors(api_major) if major in majors] or sorted(set(majors))[-1:]
    version = found.version or "(unknown version)"
    entries = [
        Entry(group[1] if group else point.group, point.name, point.value, found.name, version)
        for group, point in parsed
        if group is None or group[0] == readable[0]
    ]
    return tuple(sorted(entries, key=lambda entry: (entry.kind, entry.name))), majors


def _violations(entries: Sequence[Entry]) -> Iterator[str]:
    """The rules that the distribution's declarations break."""
    known = (*KINDS, *PLANNED_KINDS)
    for entry in entries:
        close = close_matches(entry.kind.rpartition(".")[2], known)
        if "." in entry.kind:
            group = f"slapo.v{API_MAJOR}.{close[0] if close else 'primitives'}"
            yield f"group '{entry.kind}' is not of the form 'slapo.v<major>.<kind>'; it should be '{group}'"
        elif entry.kind not in known and close:
            yield f"there is no kind '{entry.kind}'; did you mean '{close[0]}'?"
        violation = _value_violation(entry) or name_violation(entry)
        if violation is not None:
            yield violation
    for (kind, name), count in Counter((entry.kind, entry.name) for entry in entries).items():
        if count > 1:
            yield f"{noun(kind)} name '{name}' is declared {count} times"
    namespaces = sorted({entry.namespace for entry in entries if entry.kind in KINDS and entry.namespace})
    if len(namespaces) > 1:
        yield f"names in {len(namespaces)} namespaces ({', '.join(namespaces)}); a distribution has one"
    if sum(entry.kind == "hooks" for entry in entries) > 1:
        yield "more than one hooks module; a distribution has at most one"


def _value_violation(entry: Entry) -> str | None:
    pattern, form = (_MODULE, "package.module") if entry.kind == "hooks" else (_OBJECT, "package.module:Class")
    if entry.kind not in KINDS or pattern.match(entry.value):
        return None
    return f"{noun(entry.kind)} '{entry.name}' points to {entry.value!r}, which is not of the form '{form}'"


def _mark_conflicts(plugin: Plugin, conflicts: dict[tuple[str, str], tuple[str, ...]]) -> Plugin:
    mine = [(entry.kind, entry.name) for entry in plugin.entries if (entry.kind, entry.name) in conflicts]
    if plugin.state != "ok" or not mine:
        return plugin
    others = sorted({other for key in mine for other in conflicts[key]} - {plugin.name})
    names = ", ".join(f"'{name}'" for _, name in mine)
    reason = f"{names} also provided by {', '.join(others)}; its other names work"
    remedy = f"uninstall or disable one: {DISABLE}={plugin.name} or {DISABLE}={','.join(others)}"
    return replace(plugin, state="conflict", reason=reason, remedy=remedy)
