"""``slapo plugins list`` and ``slapo plugins show``: the installed plugins and their states."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slapo_core.cli.arguments import AsJson
from slapo_core.cli.output import print_json, print_table
from slapo_core.plugins import current_registry
from slapo_core.plugins.metadata import CORE_DISTRIBUTION

if TYPE_CHECKING:
    from slapo_core.plugins.metadata import Plugin
    from slapo_core.plugins.registry import Registry


def list_plugins(
    as_json: AsJson = False,
    kind: Annotated[str | None, typer.Option("--kind", help="Only plugins that provide this kind.")] = None,
) -> None:
    """List the installed plugins with their state, and what to do about those that are not ok. Imports none."""
    registry = current_registry()
    if kind is not None and kind not in registry.kinds:
        raise typer.BadParameter(f"no kind '{kind}'; the kinds are {', '.join(registry.kinds)}", param_hint="--kind")
    chosen = [plugin for plugin in registry.plugins if kind is None or plugin.provides(kind)]
    error = registry.settings_error
    if as_json:
        print_json(
            {
                "core": {"name": CORE_DISTRIBUTION, "version": registry.core_version},
                "error": None if error is None else str(error),
                "plugins": [_plugin_json(plugin, registry) for plugin in chosen],
            }
        )
    else:
        print_table(("PLUGIN", "VERSION", "STATE", "PROVIDES", "REASON"), [_row(plugin, kind) for plugin in chosen])
        _print_remarks(chosen)
    if error is not None:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1)


def show(
    name: Annotated[str, typer.Argument(help="A distribution, e.g. acme-slapo.")],
    as_json: AsJson = False,
) -> None:
    """Show one plugin: state, reason, remedy, where it lies, and everything it provides. Does not import it."""
    plugin = current_registry().plugin(name)
    if as_json:
        print_json(_plugin_json(plugin, current_registry()))
        return
    print(f"{'plugin':<10}{plugin.label}")
    for field in ("summary", "state", "reason", "remedy", "source"):
        if value := getattr(plugin, field):
            print(f"{field:<10}{value}")
    if plugin.entries:
        print()
        print_table(("KIND", "NAME", "OBJECT"), [(entry.kind, entry.name, entry.value) for entry in plugin.entries])


def _plugin_json(plugin: Plugin, registry: Registry) -> dict[str, Any]:
    kinds = sorted({*registry.kinds, *(entry.kind for entry in plugin.entries)})
    return {
        "name": plugin.name,
        "reason": plugin.reason,
        "remedy": plugin.remedy,
        "source": plugin.source,
        "state": plugin.state,
        "summary": plugin.summary,
        "version": plugin.version,
        **{kind: list(plugin.provides(kind)) for kind in kinds},
    }


def _row(plugin: Plugin, kind: str | None) -> tuple[str, ...]:
    counts = [f"{len(plugin.provides(each))} {each}" for each in sorted({entry.kind for entry in plugin.entries})]
    provided = ", ".join(counts if kind is None else plugin.provides(kind))
    return (plugin.name, plugin.version or "-", plugin.state, provided or plugin.summary or "-", plugin.reason or "")


def _print_remarks(plugins: list[Plugin]) -> None:
    remedies = [f"{plugin.name}: {plugin.remedy}" for plugin in plugins if plugin.remedy]
    if remedies:
        print("", *remedies, sep="\n")
