"""``slapo plugins new``: a complete package to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(root: typer.Typer, plugins: typer.Typer) -> None:
    """Add the command of this file."""
    plugins.command("new")(new)


def new(
    name: Annotated[str, typer.Argument(help="The distribution's name, as in pip install NAME, e.g. acme-slapo.")],
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Where to write it; default: ./NAME. Must not exist.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", help="The first part of its primitives' names; default: from NAME.")
    ] = None,
) -> None:
    """Write a new plugin package: one primitive, tests on the kit, README, CI workflow."""
    from slapo_core.cli.rendering import Project, render

    project = Project.named(name, namespace=namespace)
    target = directory if directory is not None else Path(project.name)
    for path in render(project, target):
        print(f"wrote {path}")
    print(
        f"\nnext:\n"
        f"    cd {target}\n"
        f"    pip install -e '.[test]'\n"
        f"    pytest\n"
        f"    slapo plugins list\n"
        f"\nthen write your primitives after the example of {target / 'src' / project.package / 'offload.py'}"
    )
