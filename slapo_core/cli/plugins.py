"""``slapo plugins list``, ``show`` and ``check``: the installed plugins, and the rules that they keep."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from slapo_core.plugins.metadata import Plugin
    from slapo_core.plugins.registry import Registry
    from slapo_testing.conformance import Finding


def register(root: typer.Typer, plugins: typer.Typer) -> None:
    """Add the commands of this file."""
    plugins.command("list")(list_plugins)
    plugins.command("show")(show)
    plugins.command("check")(check)


def list_plugins(
    as_json_: Annotated[bool, typer.Option("--json", help="Print one JSON object, keys sorted.")] = False,
    kind: Annotated[str | None, typer.Option("--kind", help="Only plugins that provide this kind.")] = None,
) -> None:
    """List the installed plugins with their state, and what to do about those that are not ok. Imports none."""
    from slapo_core.cli.output import print_json, print_table
    from slapo_core.plugins import current_registry

    registry = current_registry()
    if kind is not None and kind not in registry.kinds:
        raise typer.BadParameter(f"no kind '{kind}'; the kinds are {', '.join(registry.kinds)}", param_hint="--kind")
    chosen = [plugin for plugin in registry.plugins if kind is None or plugin.provides(kind)]
    error = registry.settings_error
    if as_json_:
        print_json(as_json(registry, chosen))
    else:
        print_table(("PLUGIN", "VERSION", "STATE", "PROVIDES", "REASON"), [_row(plugin, kind) for plugin in chosen])
        _print_remarks(chosen)
    if error is not None:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1)


def show(
    name: Annotated[str, typer.Argument(help="A distribution, e.g. slapo-tp.")],
    as_json_: Annotated[bool, typer.Option("--json", help="Print one JSON object, keys sorted.")] = False,
) -> None:
    """Show one plugin: state, reason, remedy, where it lies, and everything it provides. Does not import it."""
    from slapo_core.cli.output import print_json, print_table
    from slapo_core.plugins import current_registry

    plugin = current_registry().plugin(name)
    if as_json_:
        print_json(_plugin_json(plugin, current_registry()))
        return
    fields = [
        ("plugin", plugin.label),
        ("state", plugin.state),
        ("reason", plugin.reason),
        ("remedy", plugin.remedy),
        ("source", plugin.source),
    ]
    for field, value in fields:
        if value:
            print(f"{field:<10}{value}")
    if plugin.entries:
        print()
        print_table(("KIND", "NAME", "OBJECT"), [(entry.kind, entry.name, entry.value) for entry in plugin.entries])


def as_json(registry: Registry, plugins: list[Plugin]) -> dict[str, Any]:
    """Return the output of ``slapo plugins list --json``."""
    from slapo_core.plugins.metadata import CORE_DISTRIBUTION

    error = registry.settings_error
    return {
        "core": {"name": CORE_DISTRIBUTION, "version": registry.core_version},
        "error": None if error is None else str(error),
        "plugins": [_plugin_json(plugin, registry) for plugin in plugins],
    }


def _plugin_json(plugin: Plugin, registry: Registry) -> dict[str, Any]:
    kinds = sorted({*registry.kinds, *(entry.kind for entry in plugin.entries)})
    return {
        "name": plugin.name,
        "reason": plugin.reason,
        "remedy": plugin.remedy,
        "source": plugin.source,
        "state": plugin.state,
        "version": plugin.version,
        **{kind: list(plugin.provides(kind)) for kind in kinds},
    }


def _row(plugin: Plugin, kind: str | None) -> tuple[str, ...]:
    kinds = sorted({entry.kind for entry in plugin.entries}) if kind is None else [kind]
    counts = [f"{len(plugin.provides(item))} {item}" for item in kinds]
    if kind is not None:
        counts = [", ".join(plugin.provides(kind))]
    return (plugin.name, plugin.version or "-", plugin.state, ", ".join(counts) or "-", plugin.reason or "")


def _print_remarks(plugins: list[Plugin]) -> None:
    remedies = [plugin for plugin in plugins if plugin.remedy]
    if remedies:
        print()
    for plugin in remedies:
        print(f"{plugin.name}: {plugin.remedy}")


def check(
    name: Annotated[str | None, typer.Argument(help="A distribution, e.g. slapo-tp; default: all.")] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the chained traceback of failures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, keys sorted.")] = False,
) -> None:
    """Import plugins and check them: rules, documentation, import time, and the cases that they ship.

    Exits with status 1 if any check fails. Progress goes to stderr.
    """
    from slapo_core.cli.output import print_json
    from slapo_core.plugins import Registry
    from slapo_testing.conformance import check_plugin

    registry = Registry.discover()
    chosen = list(registry.plugins) if name is None else [registry.plugin(name)]

    findings = {plugin.name: list(check_plugin(plugin, registry, progress=_show_progress)) for plugin in chosen}
    failed = [finding for found in findings.values() for finding in found if finding.outcome == "failed"]
    if as_json:
        print_json(_findings_json(chosen, findings, traceback=traceback))
    else:
        _print_findings(chosen, findings, failed, traceback=traceback)
    if failed:
        raise typer.Exit(1)


def _show_progress(text: str) -> None:
    print(f"checking {text}", file=sys.stderr, flush=True)


def _print_findings(
    plugins: list[Plugin], findings: dict[str, list[Finding]], failed: list[Finding], *, traceback: bool
) -> None:
    from slapo_core.cli.output import print_table

    rows = [
        (plugin.label, finding.subject, finding.check, finding.outcome, _remark(finding))
        for plugin in plugins
        for finding in findings[plugin.name]
    ]
    print_table(("PLUGIN", "WHAT", "CHECK", "RESULT", "REMARK"), rows)
    for finding in failed:
        print(f"\n{finding.plugin}: {finding.subject}: {finding.check}\n{finding.message}")
        if traceback and finding.traceback:
            print(finding.traceback.rstrip())
    skipped = sum(finding.outcome == "skipped" for found in findings.values() for finding in found)
    print(f"\n{len(rows)} checks of {_count(plugins)}: {len(failed)} failed, {skipped} skipped")
    if failed and not traceback:
        print("`slapo plugins check NAME --traceback` shows where")


def _count(plugins: list[Plugin]) -> str:
    return plugins[0].label if len(plugins) == 1 else f"{len(plugins)} plugins"


def _remark(finding: Finding) -> str:
    return "see below" if finding.outcome == "failed" else finding.message


def _findings_json(plugins: list[Plugin], findings: dict[str, list[Finding]], *, traceback: bool) -> dict[str, Any]:
    """``{"ok": bool, "plugins": [{"name", "version", "state", "ok", "checks": [...]}]}``."""

    def one(finding: Finding) -> dict[str, str]:
        value = {
            "check": finding.check,
            "message": finding.message,
            "outcome": finding.outcome,
            "subject": finding.subject,
        }
        return {**value, "traceback": finding.traceback} if traceback else value

    listed = [
        {
            "checks": [one(finding) for finding in findings[plugin.name]],
            "name": plugin.name,
            "ok": all(finding.outcome != "failed" for finding in findings[plugin.name]),
            "state": plugin.state,
            "version": plugin.version,
        }
        for plugin in plugins
    ]
    return {"ok": all(plugin["ok"] for plugin in listed), "plugins": listed}
