"""Whether a plugin was made for this slapo-core: the API major of its groups and its ``Requires-Dist`` range.

Both are read from metadata, before anything is imported. A plugin that does not fit gives its state, the reason, and
the command that mends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from slapo_core.plugins.model import State, core_label
from slapo_core.spec.reserved import CORE_DISTRIBUTION

__all__ = ["check_majors", "check_requirement", "parse_group", "readable_majors"]

_GROUP = re.compile(r"slapo\.v([1-9][0-9]*)\.([a-z][a-z0-9_]*)\Z")
_REQUIRES_CORE = re.compile(r"\s*slapo[-_.]+core(?![\w.-])", re.IGNORECASE)


def readable_majors(api_major: int) -> tuple[int, ...]:
    """The API majors that a core of ``api_major`` reads, newest first: its own and the one before."""
    return tuple(major for major in (api_major, api_major - 1) if major >= 1)


def parse_group(group: str) -> tuple[int, str] | None:
    """``"slapo.v1.primitives"`` as ``(1, "primitives")``; None if it is not of that form."""
    match = _GROUP.match(group)
    return (int(match[1]), match[2]) if match else None


def check_majors(
    majors: Iterable[int], *, plugin: str, api_major: int, core: str | None
) -> tuple[State, str, str] | None:
    """None if one of the plugin's API ``majors`` can be read by a core of ``api_major``."""
    declared, readable = sorted(set(majors)), readable_majors(api_major)
    if not declared or set(declared) & set(readable):
        return None
    written = " and ".join(f"v{major}" for major in declared)
    reads = " and ".join(f"v{major}" for major in readable)
    old = CORE_DISTRIBUTION if declared[0] > api_major else plugin
    reason = f"written for plugin API {written}; {core_label(core)} reads {reads}"
    return "incompatible", reason, f"pip install --upgrade {old}"


def check_requirement(requires: Sequence[str], *, plugin: str, core: str | None) -> tuple[State, str, str] | None:
    """None if every ``Requires-Dist`` line about slapo-core admits the version ``core``."""
    lines = [line for line in requires if _REQUIRES_CORE.match(line)]  # packaging is slow to import
    found = (_check_line(line, plugin=plugin, core=core) for line in lines)
    return next((verdict for verdict in found if verdict is not None), None)


def _check_line(line: str, *, plugin: str, core: str | None) -> tuple[State, str, str] | None:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(line)
    except InvalidRequirement as error:
        reason = f"malformed 'Requires-Dist: {line}': {str(error).splitlines()[0]}"
        return "broken", reason, f"pip install --upgrade {plugin}"
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    if not requirement.specifier or (core is not None and requirement.specifier.contains(core, prereleases=True)):
        return None
    needs = f"needs {CORE_DISTRIBUTION}{requirement.specifier}"
    if core is None:
        reason = f"{needs}; {CORE_DISTRIBUTION} runs from a source tree without version"
        return "incompatible", reason, "pip install -e ."
    remedy = f'pip install "{CORE_DISTRIBUTION}{requirement.specifier}", or a release of {plugin} for this version'
    return "incompatible", f"{needs}; installed is {CORE_DISTRIBUTION} {core}", remedy
