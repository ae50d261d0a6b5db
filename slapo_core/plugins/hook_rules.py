"""What a hooks module may hold: the hooks that there are, which of them take one answer, and every rule broken."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pluggy

from slapo_core.plugins.config import close_matches
from slapo_core.spec import hookspecs

__all__ = ["first_result_hooks", "hook_violations", "hooks_not_asked", "implemented_hooks", "specified_hooks"]


def hook_violations(module: ModuleType) -> list[str]:
    """Every rule that a hooks module breaks, in words: misspelt names, missing decorators, wrong arguments.

    Args:
        module: the hooks module of a distribution.
    """
    found = list(_implementations(module))
    violations = [_violation(*implementation) for implementation in found]
    for hook, count in Counter(hook for hook, _, _ in found if hook in first_result_hooks()).items():
        if count > 1:
            violations.append(f"'{hook}' is implemented {count} times; it may have one answer")
    return [violation for violation in violations if violation is not None]


def implemented_hooks(module: ModuleType) -> frozenset[str]:
    """The hooks that a module has a function for."""
    return frozenset(hook for hook, _, _ in _implementations(module))


def hooks_not_asked(module: ModuleType) -> list[str]:
    """The hooks that a module implements and this version does not ask, e.g. ``["slapo_partition"]``."""
    return [hook for hook, _, _ in _implementations(module) if hook in hookspecs.NOT_ASKED]


def _implementations(module: ModuleType) -> Iterator[tuple[str, Any, dict[str, Any] | None]]:
    """The functions decorated with ``@hookimpl``, and those named as if they were, with the hook that each is for."""
    for name, function in inspect.getmembers(module, inspect.isfunction):
        options = getattr(function, f"{hookspecs.PROJECT}_impl", None)
        if options is not None or name.startswith(f"{hookspecs.PROJECT}_"):
            yield (options or {}).get("specname") or name, function, options


def _violation(hook: str, function: Any, options: dict[str, Any] | None) -> str | None:
    known = specified_hooks().get(hook)
    if hook in hookspecs.NOT_ASKED:
        return None
    if known is None:
        close = close_matches(hook, specified_hooks())
        return f"there is no hook '{hook}'" + (f"; did you mean '{close[0]}'?" if close else "")
    if options is None:
        return f"'{hook}' is not decorated with @hookimpl"
    ordering = [key for key in ("hookwrapper", "wrapper", "tryfirst", "trylast") if options.get(key)]
    if ordering:
        return f"'{hook}' uses @hookimpl({ordering[0]}=True); the order of calls has no meaning here"
    wrong = [argument for argument in inspect.signature(function).parameters if argument not in known]
    if wrong:
        close = close_matches(wrong[0], known)
        meant = f"; did you mean '{close[0]}'?" if close else ""
        return f"'{hook}' takes '{wrong[0]}', but the arguments of this hook are ({', '.join(known)}){meant}"
    return None


@functools.cache
def specified_hooks() -> dict[str, tuple[str, ...]]:
    """The hooks of this version, with their arguments."""
    return {
        name: tuple(inspect.signature(function).parameters)
        for name, function in inspect.getmembers(hookspecs, inspect.isfunction)
        if name.startswith(f"{hookspecs.PROJECT}_")
    }


@functools.cache
def first_result_hooks() -> frozenset[str]:
    """The hooks that at most one active plugin may answer."""
    parse = pluggy.PluginManager(hookspecs.PROJECT).parse_hookspec_opts
    return frozenset(
        name for name in specified_hooks() if (options := parse(hookspecs, name)) and options["firstresult"]
    )
