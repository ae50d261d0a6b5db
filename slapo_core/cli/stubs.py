"""``slapo stubs``: teach mypy, pyright and editors the primitives that are installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(root: typer.Typer, plugins: typer.Typer) -> None:
    """Add the command of this file."""
    root.command("stubs")(stubs)


def stubs(
    install: Annotated[bool, typer.Option("--install", help="Write into this environment's site-packages.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 and show the diff if out of date.")] = False,
    output: Annotated[Path | None, typer.Option("--output", help="Write into (or check) this directory.")] = None,
) -> None:
    """Make typed stubs of the installed primitives; without an option, print them. Imports every primitive.

    mypy reads stubs from site-packages only: use --install. pyright also reads them from its stubPath:
    --output typings.
    """
    from slapo_core.cli.typestubs import make_stubs
    from slapo_core.plugins import current_registry
    from slapo_core.plugins.metadata import core_version

    if install and output is not None:
        raise typer.BadParameter("choose one of --install and --output", param_hint="--output")
    package = make_stubs(current_registry())
    for item in package.omissions:
        print(f"left out: {item.what}: {item.reason}", file=sys.stderr)
    if check:
        _check(package.difference, output)
    elif install:
        written = package.install(_site_packages(), core_version() or "0")
        print(f"wrote {written}; to remove it: pip uninstall slapo-core-stubs")
    elif output is not None:
        print(f"wrote {package.write(output)}")
    else:
        print(package.vocabulary, end="")


def _check(difference: Callable[[Path], str], output: Path | None) -> None:
    from slapo_core.cli.typestubs import STUB_PACKAGE

    directory = output if output is not None else _site_packages()
    command = f"slapo stubs --output {output}" if output is not None else "slapo stubs --install"
    place = directory / STUB_PACKAGE
    if not place.is_dir():
        print(f"error: there are no stubs at {place}\n  hint: {command}", file=sys.stderr)
        raise typer.Exit(1)
    diff = difference(directory)
    if diff:
        print(diff, end="")
        print(f"error: the stubs at {place} are out of date\n  hint: {command}", file=sys.stderr)
        raise typer.Exit(1)
    print(f"the stubs at {place} are up to date")


def _site_packages() -> Path:
    import sysconfig

    return Path(sysconfig.get_path("purelib"))
