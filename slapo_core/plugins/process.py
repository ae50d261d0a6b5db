"""The registry of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from slapo_core.plugins.local import LocalEntries
from slapo_core.plugins.registry import Registry

__all__ = ["current_registry", "use_registry"]

_chosen: ContextVar[Registry | None] = ContextVar("slapo_registry", default=None)


class _Process:
    """The registry discovered last, and what the discovery depended on."""

    def __init__(self) -> None:
        self.local = LocalEntries()
        self.key: tuple[object, ...] | None = None
        self.registry: Registry | None = None


_process = _Process()


def current_registry() -> Registry:
    """The registry in force: the one chosen with `use_registry`, else the one of this process.

    The process's registry is discovered at the first call, and anew when ``sys.path``, a ``SLAPO_*`` variable or the
    working directory changed; what was registered in process stays.
    """
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    project = _working_directory()
    settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith("SLAPO_")))
    key = (tuple(sys.path), settings, project)
    if _process.registry is None or _process.key != key:
        _process.registry = Registry.discover(project=project, local=_process.local)
        _process.key = key
    return _process.registry


@contextmanager
def use_registry(registry: Registry) -> Iterator[Registry]:
    """Make ``registry`` the current one within a ``with`` block of this thread or task: for tests."""
    token = _chosen.set(registry)
    try:
        yield registry
    finally:
        _chosen.reset(token)


def _working_directory() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:  # the directory was removed under us: no project then
        return None
