"""``slapo doctor``: what is here, what is wrong with it, and the command that mends it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slapo_core.cli.diagnosis import Report

__all__ = ["register"]


def register(root: typer.Typer, plugins: typer.Typer) -> None:
    """Add the command of this file."""
    root.command("doctor")(doctor)


def doctor(
    ask: Annotated[
        list[str] | None,
        typer.Option("--ask", help="A plugin whose own slapo_doctor hook to ask as well; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, keys sorted.")] = False,
) -> None:
    """Look over the environment; exit 1 if something is wrong.

    Imports torch, and no plugin but those named with --ask.
    """
    from slapo_core.cli.diagnosis import diagnose
    from slapo_core.cli.output import print_json
    from slapo_core.plugins import current_registry

    report = diagnose(current_registry(), ask=ask or ())
    if as_json:
        print_json(report.as_json())
    else:
        _print(report)
    if report.problems:
        raise typer.Exit(1)


def _print(report: Report) -> None:
    width = max(len(fact.what) for fact in report.facts) + 2
    for fact in report.facts:
        print(f"{fact.what:<{width}}{fact.value}")
    print()
    if not report.problems:
        print("nothing is wrong")
        return
    print(f"{len(report.problems)} problem{'s' if len(report.problems) != 1 else ''}:")
    for number, problem in enumerate(report.problems, start=1):
        print(f"{number}. {problem.message}")
        if problem.hint:
            print(f"   fix: {problem.hint}")
