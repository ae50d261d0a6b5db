"""Check an installed plugin by rules, kits and its cases, for ``slapo plugins check``.

A distribution may ship the cases of its primitives and dialects, as a function that returns a list of `Case` and
`DialectCase`: ``slapo_cases()`` in the module of the primitive or dialect, or the function of an entry point of the
group ``slapo.v1.cases``. Its own tests use the same list: ``@parametrize_checks(slapo_cases())``, or
``@parametrize_dialect_checks(slapo_cases())``. Objects of kinds of other distributions are checked by the `Kit` of the
kind's owner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slapo_core.errors import ArgumentError, PluginError
from slapo_core.internals import HookManager
from slapo_core.plugins import LOCAL_VERSION, Entry, Kind, Plugin, Registry, use_registry
from slapo_testing.case import Case
from slapo_testing.check import CheckError, NotApplicable
from slapo_testing.checks import CHECKS
from slapo_testing.checks.declarations import documentation_violations, round_trip_value
from slapo_testing.dialects.case import DialectCase
from slapo_testing.dialects.checks import DIALECT_CHECKS
from slapo_testing.kit import Kit
from slapo_testing.new_command import hides_member
from slapo_testing.parametrize import case_labels
from slapo_testing.probe import MODULE_LIMIT, probe

if TYPE_CHECKING:
    import torch

CASES_FUNCTION = "slapo_cases"
"""The function of a plugin's module that returns its cases."""

_KINDS_WITH_CASES = ("primitives", "dialects")
_DONE_FOR_EVERY_ENTRY = ("documentation", "light_import")

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Args:
        plugin: the distribution, e.g. ``"slapo-hello"``.
        subject: the checked object, e.g. ``"hello.freeze"``; with the case in brackets: ``"hello.freeze [freeze-2]"``.
        check: name of the check, e.g. ``"undo_is_exact"``.
        outcome: ``"passed"``, ``"failed"`` or ``"skipped"``.
        message: the reason of a failure or skip.
        traceback: the chained traceback of a failure.
    """

    plugin: str
    subject: str
    check: str
    outcome: Outcome
    message: str = ""
    traceback: str = ""


def check_plugin(
    plugin: Plugin,
    registry: Registry,
    *,
    device: torch.device | str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Finding]:
    """Yield the findings about one plugin.

    Args:
        plugin: one of ``registry.plugins``.
        registry: loads the plugin.
        device: device of cases without one; None: the accelerator if there is one, else the CPU.
        progress: called with the name of the next check.
    """
    report = functools.partial(Finding, plugin.name)
    if plugin.state == "disabled":
        yield report(plugin.name, "state", "skipped", f"disabled: {plugin.reason}")
        return
    if plugin.state != "ok":
        yield report(plugin.name, "state", "failed", f"{plugin.state}: {plugin.reason}\n  hint: {plugin.remedy}")
        if not plugin.usable:
            return
    else:
        yield report(plugin.name, "state", "passed", plugin.reason or "")
    for kind in sorted({entry.kind for entry in plugin.entries} - set(registry.kinds)):
        yield report(kind, "load", "skipped", f"no installed distribution uses {kind}")
    progress(f"{plugin.name}: imports")
    entries = [entry for entry in plugin.entries if registry.kinds.get(entry.kind, Kind(None)).base is not None]
    modules = sorted({entry.value.partition(":")[0] for entry in entries})
    if modules and plugin.version != LOCAL_VERSION:
        probed = probe(*modules)
        outcome: Outcome = "failed" if probed.violations else "passed"
        message = "; ".join(probed.violations) or f"{probed.modules} modules beyond torch (limit {MODULE_LIMIT})"
        yield report(plugin.name, "light_import", outcome, message, probed.traceback)
        if not probed.usable:
            return  # it would end or block this process, too
    with use_registry(registry):
        for entry in entries:
            yield from _check_entry(entry, registry, report)
        yield from _check_cases(plugin, registry, report, device, progress)


def _check_entry(entry: Entry, registry: Registry, report: Callable[..., Finding]) -> Iterator[Finding]:
    try:
        loaded = registry.load(entry)
    except PluginError as error:
        yield report(entry.name, "load", "failed", str(error), _traceback(error))
        return
    yield report(entry.name, "load", "passed")
    if entry.kind == "hooks":
        try:
            HookManager(registry).activate(entry.distribution)
        except PluginError as error:
            yield report(entry.name, "hooks", "failed", str(error), _traceback(error))
            return
        yield report(entry.name, "hooks", "passed")
    elif entry.kind == "primitives":
        for part in entry.name.split("."):
            if hides_member(part):
                text = f"'{part}' is a member of nodes or schedules, which hides sch[...].{part}"
                yield report(entry.name, "names", "failed", text)
        yield _from_violations(report, entry.name, "documentation", documentation_violations(loaded))
        if all(_has_default(field) for field in dataclasses.fields(loaded)):
            yield _run(report, entry.name, "json_of_defaults", lambda: round_trip_value(loaded()))
    if entry.kind in registry.names("kits"):
        kit: Kit = registry.load(entry.kind, "kits")()
        for name, check in kit.checks(loaded, entry, registry):
            yield _run(report, entry.name, name, check)


def _check_cases(
    plugin: Plugin,
    registry: Registry,
    report: Callable[..., Finding],
    device: torch.device | str | None,
    progress: Callable[[str], None],
) -> Iterator[Finding]:
    tested: set[tuple[str, str]] = set()
    for where, function in _cases_functions(plugin, registry):
        try:
            cases = [case if case.device else dataclasses.replace(case, device=device) for case in _cases(function)]
        except Exception as error:  # noqa: BLE001 - a finding about the plugin, like any other
            yield report(f"{where}()", "cases", "failed", f"{type(error).__name__}: {error}", _traceback(error))
            continue
        for label, case in zip(case_labels(cases), cases, strict=True):
            kind, name, checks = _checks_of(case)
            tested.add((kind, name))
            for check, run in checks.items():
                progress(f"{plugin.name}: {name} [{label}]: {check}")
                yield _run(report, f"{name} [{label}]", check, run)
    for entry in plugin.entries:
        module = entry.value.partition(":")[0]
        is_untested = entry.kind in _KINDS_WITH_CASES and (entry.kind, entry.name) not in tested
        if is_untested and module in sys.modules:
            why = f"behavior is not checked: {module} has no {CASES_FUNCTION}() with a case for it"
            yield report(entry.name, "cases", "skipped", why)


def _cases_functions(plugin: Plugin, registry: Registry) -> Iterator[tuple[str, Any]]:
    """Yield a plugin's functions of cases with their names: of entry points, else of its modules."""
    published = [entry for entry in plugin.entries if entry.kind == "cases"]
    for entry in published:
        with contextlib.suppress(PluginError):  # reported by load
            yield entry.value.replace(":", "."), registry.load(entry)
    modules = [each.value.partition(":")[0] for each in plugin.entries if each.kind in _KINDS_WITH_CASES]
    for module in dict.fromkeys(modules) if not published else ():
        if (function := getattr(sys.modules.get(module), CASES_FUNCTION, None)) is not None:
            yield f"{module}.{CASES_FUNCTION}", function


def _checks_of(case: Case | DialectCase) -> tuple[str, str, dict[str, Callable[[], None]]]:
    """Return the kind and name of a case's subject, and the checks that need a case."""
    checks: dict[str, Callable[[], None]]
    if isinstance(case, Case):
        kind, name = "primitives", case.value().name
        checks = {check.name: functools.partial(check, case) for check in CHECKS}
    else:
        kind, name = "dialects", case.dialect_name
        checks = {check.name: functools.partial(check, case) for check in DIALECT_CHECKS}
    return kind, name, {check: run for check, run in checks.items() if check not in _DONE_FOR_EVERY_ENTRY}


def _cases(function: Any) -> list[Case | DialectCase]:
    cases = list(function())
    for case in cases:
        if not isinstance(case, (Case, DialectCase)):
            raise ArgumentError(f"{CASES_FUNCTION}() must return a list of Case and DialectCase (got {case!r})")
    return cases


def _run(report: Callable[..., Finding], subject: str, check: str, action: Callable[[], None]) -> Finding:
    try:
        action()
    except NotApplicable as reason:
        return report(subject, check, "skipped", str(reason))
    except CheckError as error:
        return report(subject, check, "failed", str(error), _traceback(error))
    except Exception as error:  # noqa: BLE001 - a finding about the plugin, like any other
        return report(subject, check, "failed", f"{type(error).__name__}: {error}", _traceback(error))
    return report(subject, check, "passed")


def _from_violations(report: Callable[..., Finding], subject: str, check: str, violations: list[str]) -> Finding:
    return report(subject, check, "failed" if violations else "passed", "; ".join(violations))


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
