"""``slapo primitives``, ``dialects`` and ``patterns``: the names that plugins provide."""

from __future__ import annotations

import inspect
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from slapo_core.plugins.metadata import Entry
    from slapo_core.plugins.registry import Registry


def register(root: typer.Typer, plugins: typer.Typer) -> None:
    """Add the commands of this file."""
    root.command("primitives")(primitives)
    root.command("dialects")(dialects)
    patterns = typer.Typer(
        help='The patterns that plugins provide: sch.find("fusion.sdpa").',
        no_args_is_help=True,
        rich_markup_mode=root.rich_markup_mode,
    )
    patterns.command("list")(list_patterns)
    patterns.command("show")(show_pattern)
    root.add_typer(patterns, name="patterns")


def primitives(
    name: Annotated[str | None, typer.Argument(help="One primitive, bare or full, e.g. shard or tp.shard.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, keys sorted.")] = False,
) -> None:
    """List the usable primitives, importing none; with a NAME, load that one and show arguments and documentation."""
    from slapo_core.cli.output import print_json, print_table
    from slapo_core.plugins import current_registry

    registry = current_registry()
    registry.check_settings()
    if name is not None:
        _show_primitive(registry, name, as_json=as_json)
        return
    listed = names_json(registry, "primitives")
    if as_json:
        print_json(listed)
        return
    rows = [(item["name"], item["bare"] or "-", f"{item['distribution']} {item['version']}") for item in listed]
    print_table(("PRIMITIVE", "BARE NAME", "PLUGIN"), rows)


def names_json(registry: Registry, kind: str) -> list[dict[str, Any]]:
    """The usable names of a kind; ``bare`` is None where the bare name means nothing or several things."""
    bare = set(registry.bare_names(kind))
    entries = [registry.resolve(kind, name) for name in registry.names(kind)]
    return [
        {
            "bare": entry.bare if entry.bare in bare and registry.resolve(kind, entry.bare) == entry else None,
            "distribution": entry.distribution,
            "name": entry.name,
            "version": entry.version,
        }
        for entry in entries
    ]


def _show_primitive(registry: Registry, name: str, *, as_json: bool) -> None:
    from slapo_core.cli.output import print_json
    from slapo_core.primitive import public_signature

    entry = registry.resolve("primitives", name)
    cls = registry.load(entry)
    arguments = [_argument(parameter) for parameter in public_signature(cls).parameters.values()]
    documentation = inspect.getdoc(cls) or ""
    if as_json:
        print_json(_primitive_json(entry, arguments, documentation))
        return
    print(f"{entry.name}  ({entry.label}, {entry.value})")
    for argument in arguments:
        default = "" if argument["required"] else f" = {argument['default']}"
        print(f"    {argument['name']}: {argument['type']}{default}")
    print()
    print(documentation or "(no documentation)")


def _argument(parameter: inspect.Parameter) -> dict[str, Any]:
    required = parameter.default is inspect.Parameter.empty
    annotation = parameter.annotation
    return {
        "default": None if required else repr(parameter.default),
        "name": parameter.name,
        "required": required,
        "type": annotation if isinstance(annotation, str) else inspect.formatannotation(annotation),
    }


def _primitive_json(entry: Entry, arguments: list[dict[str, Any]], documentation: str) -> dict[str, Any]:
    return {
        "arguments": arguments,
        "distribution": entry.distribution,
        "documentation": documentation,
        "name": entry.name,
        "object": entry.value,
        "version": entry.version,
    }


def dialects(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, keys sorted.")] = False,
) -> None:
    """List the usable dialects, the values of ``build(..., target=...)``. Imports none."""
    from slapo_core.cli.output import print_json, print_table
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


def list_patterns(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, keys sorted.")] = False,
) -> None:
    """List the usable patterns. Imports none."""
    from slapo_core.cli.output import print_json, print_table
    from slapo_core.plugins import current_registry

    registry = current_registry()
    registry.check_settings()
    listed = names_json(registry, "patterns")
    if as_json:
        print_json(listed)
        return
    rows = [(item["name"], item["bare"] or "-", f"{item['distribution']} {item['version']}") for item in listed]
    print_table(("PATTERN", "BARE NAME", "PLUGIN"), rows)


def show_pattern(
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
    print(f"Finds:\n\n{textwrap.indent(forms, '    ')}\n")
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
