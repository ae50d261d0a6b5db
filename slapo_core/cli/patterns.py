"""``slapo patterns list`` and ``slapo patterns show``: the patterns that plugins provide by name."""

from __future__ import annotations

import inspect
import textwrap
from typing import Annotated

import typer

__all__ = ["register"]


def register(root: typer.Typer, plugins: typer.Typer) -> None:
    """Add the family of commands of this file."""
    family = typer.Typer(
        help='The patterns that plugins provide: sch.find("fusion.sdpa").',
        no_args_is_help=True,
        rich_markup_mode=root.rich_markup_mode,
    )
    family.command("list")(list_)
    family.command("show")(show)
    root.add_typer(family, name="patterns")


def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, keys sorted.")] = False,
) -> None:
    """List the usable patterns. Imports none."""
    from slapo_core.cli.output import print_json, print_table
    from slapo_core.cli.primitives import names_json
    from slapo_core.plugins import current_registry

    registry = current_registry()
    registry.check_settings()
    listed = names_json(registry, "patterns")
    if as_json:
        print_json(listed)
        return
    rows = [(item["name"], item["bare"] or "-", f"{item['distribution']} {item['version']}") for item in listed]
    print_table(("PATTERN", "BARE NAME", "PLUGIN"), rows)


def show(
    name: Annotated[str, typer.Argument(help="One pattern, e.g. fusion.sdpa.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, keys sorted.")] = False,
) -> None:
    """Load one pattern, and show its documentation, the forms that it finds and what replaces them."""
    from slapo_core.cli.output import print_json
    from slapo_core.plugins import current_registry

    registry = current_registry()
    registry.check_settings()
    entry = registry.resolve("patterns", name)
    cls = registry.load(entry)
    documentation = inspect.getdoc(cls) or ""
    forms, replacement = _source(cls.forms), None if cls.replacement is None else _source(cls.replacement)
    if as_json:
        print_json(
            {
                "distribution": entry.distribution,
                "documentation": documentation,
                "forms": forms,
                "name": entry.name,
                "object": entry.value,
                "replacement": replacement,
                "version": entry.version,
            }
        )
        return
    print(f"{entry.name}  ({entry.label}, {entry.value})\n")
    print(f"{documentation or '(no documentation)'}\n")
    print(f"What it finds:\n\n{textwrap.indent(forms, '    ')}\n")
    if replacement is None:
        print("What replaces it: nothing of its own; give replace a function or a module.")
    else:
        print(f"What replaces it:\n\n{textwrap.indent(replacement, '    ')}")


def _source(function: object) -> str:
    """As its author wrote it; its name where there is no source."""
    try:
        return textwrap.dedent(inspect.getsource(function)).strip()  # type: ignore[arg-type]
    except (OSError, TypeError):
        return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
