"""``slapo plugins check``: check installed plugins by rules and kits."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slapo_core import Command
from slapo_core.cli import AsJson, print_json, print_table
from slapo_core.plugins import Registry

if TYPE_CHECKING:
    from slapo_core.plugins import Plugin
    from slapo_testing.conformance import Finding


class CheckCommand(Command):
    """Check installed plugins."""

    name = "plugins.check"

    def app(self) -> typer.Typer:
        app = typer.Typer()
        app.command()(check)
        return app


def check(
    name: Annotated[str | None, typer.Argument(help="A distribution, e.g. acme-slapo; default: all.")] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the chained traceback of failures.")] = False,
    device: Annotated[
        str | None, typer.Option(help="Device of cases, e.g. cpu; default: the accelerator if there is one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import and check plugins: rules, documentation, imports, and their cases.

    Exits with status 1 if any check fails. Progress goes to stderr.
    """
    from slapo_testing.conformance import check_plugin
    from slapo_testing.device import resolve_device

    chosen_device = resolve_device(device)
    registry = Registry.discover()
    chosen = list(registry.plugins) if name is None else [registry.plugin(name)]

    findings = {
        plugin.name: list(check_plugin(plugin, registry, device=chosen_device, progress=_show_progress))
        for plugin in chosen
    }
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
        print("`slapo plugins check NAME --traceback` shows tracebacks")


def _count(plugins: list[Plugin]) -> str:
    return plugins[0].label if len(plugins) == 1 else f"{len(plugins)} plugins"


def _remark(finding: Finding) -> str:
    return "see below" if finding.outcome == "failed" else finding.message


def _findings_json(plugins: list[Plugin], findings: dict[str, list[Finding]], *, traceback: bool) -> dict[str, Any]:
    """Convert to ``{"ok": bool, "plugins": [{"name", "version", "state", "ok", "checks": [...]}]}``."""

    def one(finding: Finding) -> dict[str, str]:
        left_out = ("plugin",) if traceback else ("plugin", "traceback")
        return {name: value for name, value in vars(finding).items() if name not in left_out}

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
