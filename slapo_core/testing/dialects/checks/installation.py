"""A dialect is installed under its name, and importing it is light."""

from __future__ import annotations

from slapo_core.plugins import current_registry
from slapo_core.spec.dialect import Dialect
from slapo_core.testing.checks.entry_point import require_entry_point
from slapo_core.testing.checks.light_import import require_light_import
from slapo_core.testing.dialects.case import DialectCase

__all__ = ["entry_point_agrees", "light_import"]


def entry_point_agrees(case: DialectCase) -> None:
    """The installed entry point of the dialect's name loads this very class, of that name."""
    require_entry_point(_class(case), "dialects")


def light_import(case: DialectCase) -> None:
    """A fresh process imports the module silently, without frameworks, and without doing or changing anything."""
    require_light_import(_class(case))


def _class(case: DialectCase) -> type[Dialect]:
    if not isinstance(case.target, str):
        return case.target
    cls: type[Dialect] = current_registry().load(case.target, "dialects")
    return cls
