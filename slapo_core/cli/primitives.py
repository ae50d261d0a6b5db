"""``slapo primitives``: what a schedule can say."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from slapo_core.plugins.metadata import Entry
    from slapo_core.plugins.registry import Registry

__all__ = ["names_json", "register"]


def register(root: typer.Typer, plugins: typer.Typer) -> None:
    """Add the command of this file."""
    root.command("primitives")(primitives)


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
        _show(registry, name, as_json=as_json)
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


def _show(registry: Registry, name: str, *, as_json: bool) -> None:
    from slapo_core.cli.output import print_json
    from slapo_core.spec.primitive import public_signature

    entry = registry.resolve("primitives", name)
    cls = registry.load(entry)
    arguments = [_argument(parameter) for parameter in public_signature(cls).parameters.values()]
    documentation = inspect.getdoc(cls) or ""
    if as_json:
        print_json(_as_json(entry, arguments, documentation))
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


def _as_json(entry: Entry, arguments: list[dict[str, Any]], documentation: str) -> dict[str, Any]:
    return {
        "arguments": arguments,
        "distribution": entry.distribution,
        "documentation": documentation,
        "name": entry.name,
        "object": entry.value,
        "version": entry.version,
    }
