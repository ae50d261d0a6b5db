"""``slapo dialects``: what a schedule can be built for."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["register"]


def register(root: typer.Typer, plugins: typer.Typer) -> None:
    """Add the command of this file."""
    root.command("dialects")(dialects)


def dialects(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, keys sorted.")] = False,
) -> None:
    """List the usable dialects, the values of ``build(..., target=...)``. Imports none."""
    from slapo_core.cli.output import print_json, print_table
    from slapo_core.cli.primitives import names_json
    from slapo_core.plugins import current_registry

    registry = current_registry()
    registry.check_settings()
    listed = [
        {key: item[key] for key in ("distribution", "name", "version")} for item in names_json(registry, "dialects")
    ]
    if as_json:
        print_json(listed)
        return
    print_table(("DIALECT", "PLUGIN"), [(item["name"], f"{item['distribution']} {item['version']}") for item in listed])
