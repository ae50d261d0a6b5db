"""Importing a plugin costs little and changes nothing."""

from __future__ import annotations

from slapo_core.testing.case import Case
from slapo_core.testing.check import CheckError, NotApplicable
from slapo_core.testing.probe import MODULE_LIMIT, probe

__all__ = ["light_import", "require_light_import"]


def light_import(case: Case) -> None:
    """A fresh process imports the module silently, without frameworks, and without doing or changing anything."""
    require_light_import(type(case.value()))


def require_light_import(cls: type) -> None:
    """Hold the module of a class against the rules of importing.

    Raises:
        CheckError: every rule that it breaks is named.
        NotApplicable: the class is defined in a script.
    """
    module = cls.__module__
    if module == "__main__":
        raise NotApplicable(f"{cls.__qualname__} is defined in a script: nothing imports it")
    violations = probe(module).violations
    if violations:
        raise CheckError(
            f"importing {module} is not light",
            required=f"at most {MODULE_LIMIT} modules beyond torch, no framework among them; nothing printed or "
            "written, no process, thread or connection started, no global state changed",
            got="; ".join(violations),
            hint="import frameworks and do work inside the functions that need them",
        )
