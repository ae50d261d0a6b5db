"""``slapo tune``: studies from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slapo_core import Command

__all__ = ["TuneCommands"]


class TuneCommands(Command):
    """``slapo tune run|resume|report|show|best``."""

    name = "tune"

    def app(self) -> typer.Typer:
        app = typer.Typer(help="Search the best schedule of a space.", no_args_is_help=True)
        app.callback()(lambda: None)
        app.command()(run)
        return app


def run(study: Annotated[Path, typer.Argument(help="A file with a Study named `study` at its top level.")]) -> None:
    """Run a study to its end."""
    raise NotImplementedError(study)
