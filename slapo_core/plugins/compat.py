"""Whether a plugin was made for this slapo-core: the API major of its groups and its ``Requires-Dist`` range.

Both are read from metadata, before anything is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slapo_core.spec.reserved import CORE_DISTRIBUTION

__all__ = ["Misfit", "check_majors", "check_requirement", "parse_group", "readable_majors"]

_GROUP = re.compile(r"slapo\.v([1-9][0-9]*)\.([a-z][a-z0-9_]*)\Z")
_REQUIRES_CORE = re.compile(r"\s*slapo[-_.]+core(?![\w.-])", re.IGNORECASE)


@dataclass(frozen=True)
class Misfit:
    """Why a plugin does not fit this slapo-core.

    Args:
        reason: what it needs, what there is.
        remedy: the command that mends it.
        malformed: the declaration itself cannot be read.
    """

    reason: str
    remedy: str
    malformed: bool = False


def readable_majors(api_major: int) -> tuple[int, ...]:
    """The API majors that a core of ``api_major`` reads, newest first: its own and the one before."""
    return tuple(major for major in (api_major, api_major - 1) if major >= 1)


def parse_group(group: str) -> tuple[int, str] | None:
    """``"slapo.v1.primitives"`` as ``(1, "primitives")``; None if it is not of that form."""
    match = _GROUP.match(group)
    return (int(match[1]), match[2]) if match else None


def check_majors(majors: Iterable[int], *, plugin: str, api_major: int, core: str | None) -> Misfit | None:
    """None if one of the plugin's API ``majors`` can be read by a core of ``api_major``."""
    declared, readable = sorted(set(majors)), readable_majors(api_major)
    if not declared or set(declared) & set(readable):
        return None
    written = " and ".join(f"v{major}" for major in declared)
    reads = " and ".join(f"v{major}" for major in readable)
    reason = f"written for plugin API {written}; slapo-core {core or '(version unknown)'} reads {reads}"
    newer = declared[0] > api_major
    return Misfit(reason, f"pip install --upgrade {CORE_DISTRIBUTION if newer else plugin}")


def check_requirement(requires: Sequence[str], *, plugin: str, core: str | None) -> Misfit | None:
    """None if every ``Requires-Dist`` line about slapo-core admits the version ``core``."""
    for line in requires:
        if _REQUIRES_CORE.match(line):
            misfit = _check_line(line, plugin=plugin, core=core)
            if misfit is not None:
                return misfit
    return None


def _check_line(line: str, *, plugin: str, core: str | None) -> Misfit | None:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion

    try:
        requirement = Requirement(line)
    except InvalidRequirement as error:
        problem = str(error).splitlines()[0]
        return Misfit(f"malformed 'Requires-Dist: {line}': {problem}", f"pip install --upgrade {plugin}", True)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    if not requirement.specifier:
        return None
    needs = f"needs {CORE_DISTRIBUTION}{requirement.specifier}"
    remedy = f'pip install "{CORE_DISTRIBUTION}{requirement.specifier}", or a release of {plugin} for this version'
    if core is None:
        return Misfit(f"{needs}; {CORE_DISTRIBUTION} runs from a source tree without version", "pip install -e .")
    try:
        fits = requirement.specifier.contains(core, prereleases=True)
    except InvalidVersion:
        fits = False
    return None if fits else Misfit(f"{needs}; installed is {CORE_DISTRIBUTION} {core}", remedy)
