"""``slapo doctor``: what is here, what is wrong with it, and the command that mends it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

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
    from slapo_core.plugins.process import current_registry

    report = diagnose(current_registry(), ask=ask or ())
    if as_json:
        print_json(report.as_json())
    else:
        _print(report.facts, report.problems)
    if report.problems:
        raise typer.Exit(1)


def _print(facts: dict[str, Any], problems: Any) -> None:
    for name, value in facts.items():
        if name == "plugins":
            continue
        shown = ", ".join(map(str, value)) or "none" if isinstance(value, list) else value
        print(f"{name:<12}{shown}")
    print(
        "plugins     "
        + "; ".join(f"{item['name']} {item['version'] or '-'} {item['state']}" for item in facts["plugins"])
    )
    print()
    if not problems:
        print("nothing is wrong")
        return
    print(f"{len(problems)} problem{'s' if len(problems) != 1 else ''}:")
    for number, problem in enumerate(problems, start=1):
        print(f"{number}. {problem.what}")
        if problem.remedy:
            print(f"   mend it: {problem.remedy}")
