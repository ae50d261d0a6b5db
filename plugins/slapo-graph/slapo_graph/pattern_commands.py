"""``slapo patterns``: list the patterns that plugins provide, and show one."""

from __future__ import annotations

import inspect
import textwrap
from typing import Annotated

import typer

from slapo_core import Command
from slapo_core.cli import AsJson, print_json, print_names
from slapo_core.plugins import current_registry


class PatternCommands(Command):
    """List the patterns for find(), or show one."""

    name = "patterns"

    def app(self) -> typer.Typer:
        text = 'The patterns that plugins provide: sch.find("fusion.sdpa").'
        app = typer.Typer(help=text, no_args_is_help=True)
        app.command("list")(list_patterns)
        app.command("show")(show_pattern)
        return app


def list_patterns(
    as_json: AsJson = False,
) -> None:
    """List the usable patterns. Imports none."""
    print_names("patterns", as_json=as_json)


def show_pattern(
    name: Annotated[str, typer.Argument(help="One pattern, e.g. fusion.sdpa.")],
    as_json: AsJson = False,
) -> None:
    """Load one pattern, and show its documentation, its alternatives and its replacement."""
    registry = current_registry()
    registry.check_settings()
    entry = registry.resolve("patterns", name)
    cls = registry.load(entry)
    documentation = inspect.getdoc(cls) or ""
    alternatives, replacement = _source(cls.alternatives), None if cls.replacement is None else _source(cls.replacement)
    if as_json:
        print_json(
            {
                "distribution": entry.distribution,
                "documentation": documentation,
                "alternatives": alternatives,
                "name": entry.name,
                "object": entry.value,
                "replacement": replacement,
                "version": entry.version,
            }
        )
        return
    print(f"{entry.name}  ({entry.label}, {entry.value})\n")
    print(f"{documentation or '(no documentation)'}\n")
    print(f"Finds:\n\n{textwrap.indent(alternatives, '    ')}\n")
    if replacement is None:
        print("Replacement: none of its own; give replace a function or a module.")
    else:
        print(f"Replacement:\n\n{textwrap.indent(replacement, '    ')}")


def _source(function: object) -> str:
    """Return the source of a function, or its name if the source is missing."""
    try:
        return textwrap.dedent(inspect.getsource(function)).strip()  # type: ignore[arg-type]
    except (OSError, TypeError):
        return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
