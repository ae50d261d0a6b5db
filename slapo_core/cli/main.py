"""The command ``slapo``: put together from the other files of this package, one command or family each.

A file adds its commands by a function ``register(root, plugins)``, listed in `_FAMILIES`; ``root`` is ``slapo``,
``plugins`` is ``slapo plugins``. Commands of plugins come behind them (``contributed.py``). Whatever is slow to import
is imported in the command that needs it.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from slapo_core.cli import check, device, dialects, doctor, estimate, new, patterns, plugins, primitives, stubs
from slapo_core.cli.contributed import RootGroup
from slapo_core.errors import SlapoError

__all__ = ["main", "make_app"]

_FAMILIES = (plugins, check, new, primitives, dialects, patterns, stubs, doctor, estimate, device)


def make_app() -> typer.Typer:
    """The command line with all its commands."""
    markup: Literal["rich"] | None = (
        "rich" if sys.stdout.isatty() else None
    )  # rich is slow to import, and a pipe cannot show it
    root = typer.Typer(
        name="slapo",
        cls=RootGroup,
        help="A schedule language for PyTorch training.",
        no_args_is_help=True,
        rich_markup_mode=markup,
        pretty_exceptions_enable=False,
    )
    family = typer.Typer(help="What is installed, in which state.", no_args_is_help=True, rich_markup_mode=markup)
    root.add_typer(family, name="plugins")

    @root.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", help="Show the version of slapo-core.", callback=_version, is_eager=True)
        ] = False,
    ) -> None:
        pass

    for module in _FAMILIES:
        module.register(root, family)
    return root


def main() -> None:
    """Run the command line of this process; a slapo error is printed without traceback, with exit status 1."""
    try:
        make_app()()
    except SlapoError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _version(wanted: bool) -> None:
    if wanted:
        from slapo_core.plugins.metadata import core_version

        typer.echo(f"slapo-core {core_version() or '(from a source tree, not installed)'}")
        raise typer.Exit


if __name__ == "__main__":
    main()
