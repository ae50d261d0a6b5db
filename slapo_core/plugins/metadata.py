"""Read what is installed, without importing any of it: the one user of importlib-metadata.

Only distributions whose ``entry_points.txt`` mentions a slapo group are read further; nothing here raises for what it
finds on disk: what cannot be read comes back as a `Found` with `error`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from slapo_core.spec.reserved import CORE_DISTRIBUTION

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint, IDistribution

__all__ = ["Found", "core_requirements", "core_version", "scan"]


@dataclass(frozen=True)
class Found:
    """A distribution that offers something to slapo, as it lies on disk.

    Args:
        name: canonical, e.g. ``"slapo-tp"``.
        version: as written in METADATA; None where unreadable.
        source: the metadata directory.
        entries: every entry of a ``slapo.`` group.
        requires: its ``Requires-Dist`` lines.
        error: why it could not be read; None when it could.
        shadows: metadata directories of the same distribution further down the path, which Python never sees.
    """

    name: str
    version: str | None
    source: str
    entries: tuple[EntryPoint, ...] = ()
    requires: tuple[str, ...] = ()
    error: str | None = None
    shadows: tuple[str, ...] = ()


def scan(path: Sequence[str] | None = None) -> tuple[Found, ...]:
    """Every installed distribution with an entry point in a group ``slapo.*``, sorted by name.

    Args:
        path: directories to search, like ``sys.path``, which is the default. The first directory that has a
            distribution wins, as it does for ``import``.
    """
    import importlib_metadata

    sources: dict[str, list[str]] = {}
    first: dict[str, IDistribution] = {}
    for distribution in importlib_metadata.distributions(path=list(sys.path if path is None else path)):
        name, source = _identity(distribution)
        first.setdefault(name, distribution)
        known = sources.setdefault(name, [])
        if source not in known:
            known.append(source)
    found = (_read(name, distribution, sources[name]) for name, distribution in first.items())
    return tuple(sorted((item for item in found if item is not None), key=lambda item: item.name))


@functools.cache
def core_version() -> str | None:
    """The version of the installed slapo-core; None when it runs from a bare source tree."""
    import importlib_metadata

    try:
        return importlib_metadata.version(CORE_DISTRIBUTION)
    except importlib_metadata.PackageNotFoundError:
        return None


def core_requirements() -> tuple[str, ...]:
    """What the installed slapo-core requires, e.g. ``("torch>=2.11", ...)``; empty for a bare source tree."""
    import importlib_metadata

    try:
        return tuple(importlib_metadata.requires(CORE_DISTRIBUTION) or ())
    except importlib_metadata.PackageNotFoundError:
        return ()


def _identity(distribution: IDistribution) -> tuple[str, str]:
    """The canonical name and the place of a distribution, from its directory's name: METADATA is not parsed."""
    place = getattr(distribution, "_path", None)
    if place is None:  # from a custom finder, which has no directory
        return canonicalize_name(distribution.name), f"{type(distribution).__module__} finder"
    stem = PurePath(str(place)).name.rpartition(".")[0]
    return canonicalize_name(stem.partition("-")[0]), str(place)


def _read(name: str, distribution: IDistribution, sources: Sequence[str]) -> Found | None:
    source, shadows = sources[0], tuple(sources[1:])

    def broken(reason: str, version: str | None = None, entries: tuple[EntryPoint, ...] = ()) -> Found:
        return Found(name, version, source, entries, error=reason, shadows=shadows)

    try:
        text = distribution.read_text("entry_points.txt")
    except UnicodeDecodeError as error:
        return broken(f"entry_points.txt is not UTF-8: {error.reason}") if b"[slapo." in error.object else None
    except (OSError, ValueError) as error:
        return broken(f"entry_points.txt cannot be read: {error}") if "slapo" in name else None
    if not text or "[slapo." not in text:
        return None
    try:
        points = distribution.entry_points
        entries = tuple(point for point in points if point.group.startswith("slapo."))
    except Exception as error:  # noqa: BLE001 - the parser raises whatever its lines provoke
        line = _first_malformed_line(text)
        reason = f"malformed entry_points.txt: {line!r} is not 'name = module:attribute'" if line else str(error)
        return broken(reason)
    try:
        metadata = distribution.metadata
        declared, version = metadata.get("Name"), metadata.get("Version")
        requires = tuple(distribution.requires or ())
    except Exception as error:  # noqa: BLE001 - absent, not UTF-8, not a message, ...
        return broken(f"METADATA cannot be read: {type(error).__name__}: {error}", entries=entries)
    if not declared or not version:
        missing = "Name" if not declared else "Version"
        return broken(f"METADATA has no {missing}", version, entries)
    if canonicalize_name(declared) != name:
        return broken(f"METADATA says 'Name: {declared}' but the directory is '{PurePath(source).name}'", version)
    return Found(name, version, source, entries, requires, shadows=shadows)


def _first_malformed_line(text: str) -> str | None:
    for line in map(str.strip, text.splitlines()):
        if line and not line.startswith(("#", "[")) and "=" not in line:
            return line
    return None
