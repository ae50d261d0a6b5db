"""The current registry: this process's, or a test's."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, overload

from slapo_core.plugins.metadata import DISABLE, Entry
from slapo_core.plugins.registry import Registry

if TYPE_CHECKING:
    from slapo_core.primitive import Primitive

_Class = TypeVar("_Class", bound="type[Primitive]")

_chosen: ContextVar[Registry | None] = ContextVar("slapo_registry", default=None)
_registered: dict[Entry, Any] = {}


@functools.lru_cache(maxsize=1)
def _discovered(path: tuple[str, ...], disabled: str) -> Registry:
    return Registry.discover(path=path, environ={DISABLE: disabled}, local=_registered)


def current_registry() -> Registry:
    """Return the current registry: chosen with `use_registry`, else this process's.

    The process's registry is discovered at the first call, and again when ``sys.path`` or ``SLAPO_DISABLE_PLUGINS``
    changed; entries registered in process stay.
    """
    return _chosen.get() or _discovered(tuple(sys.path), os.environ.get(DISABLE, ""))


@contextlib.contextmanager
def use_registry(registry: Registry) -> Iterator[Registry]:
    """Make a registry the current one of this thread or task in a ``with`` block: for tests."""
    token = _chosen.set(registry)
    try:
        yield registry
    finally:
        _chosen.reset(token)


@overload
def register_primitive(cls: _Class, /) -> _Class: ...
@overload
def register_primitive() -> Callable[[_Class], _Class]: ...
def register_primitive(cls: Any = None, /) -> Any:
    """Add a primitive to the current registry: a decorator for scripts and notebooks.

    Running the cell again replaces the class. A package declares an entry point instead::

        @slapo.register_primitive()
        @dataclass(frozen=True)
        class Freeze(slapo.Primitive):
            name = "my.freeze"
            ...

    ``@slapo.register_primitive`` without parentheses is the same.

    Raises:
        UnusablePluginError: the name is not ``<namespace>.<name>``, belongs to another distribution, or is provided by
            an installed plugin or another class; or the class breaks a rule.
    """

    def register(cls: _Class) -> _Class:
        current_registry().register(cls)
        return cls

    return register if cls is None else register(cls)
