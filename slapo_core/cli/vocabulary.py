"""``slapo primitives`` and ``slapo dialects``: the names that plugins provide."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slapo_core.cli.arguments import AsJson
from slapo_core.cli.output import print_json, print_table
from slapo_core.plugins import current_registry
from slapo_core.plugins.metadata import noun

if TYPE_CHECKING:
    from slapo_core.plugins.registry import Registry


def primitives(
    name: Annotated[str | None, typer.Argument(help="One primitive, bare or full, e.g. pad or acme.pad.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the usable primitives, importing none; with a NAME, load that one and show arguments and documentation."""
    if name is None:
        print_names("primitives", as_json=as_json)
    else:
        current_registry().check_settings()
        _show_primitive(current_registry(), name, as_json=as_json)


def dialects(
    as_json: AsJson = False,
) -> None:
    """List the usable dialects, the values of ``build(..., target=...)``. Imports none."""
    print_names("dialects", as_json=as_json)


def print_names(kind: str, *, as_json: bool) -> None:
    """Print the usable names of a kind, with the bare names where the kind has namespaces; imports none.

    Args:
        kind: e.g. ``"primitives"``.
        as_json: for programs; ``bare`` is None where the bare name means nothing or several things.
    """
    registry = current_registry()
    registry.check_settings()
    has_bare, bare = registry.kinds[kind].namespaced, set(registry.bare_names(kind))
    listed = []
    for entry in (registry.resolve(kind, name) for name in registry.names(kind)):
        item: dict[str, Any] = {"distribution": entry.distribution, "name": entry.name, "version": entry.version}
        if has_bare:
            is_own = entry.bare in bare and registry.resolve(kind, entry.bare) == entry
            item["bare"] = entry.bare if is_own else None
        listed.append(item)
    if as_json:
        print_json(listed)
        return
    columns = [noun(kind).upper(), *(["BARE NAME"] if has_bare else []), "PLUGIN"]
    bares = [[item["bare"] or "-"] if has_bare else [] for item in listed]
    rows = [
        [item["name"], *names, f"{item['distribution']} {item['version']}"]
        for item, names in zip(listed, bares, strict=True)
    ]
    print_table(columns, rows)


def _show_primitive(registry: Registry, name: str, *, as_json: bool) -> None:
    from slapo_core.primitive import public_signature

    entry = registry.resolve("primitives", name)
    cls = registry.load(entry)
    arguments = [_argument(parameter) for parameter in public_signature(cls).parameters.values()]
    documentation = inspect.getdoc(cls) or ""
    if as_json:
        print_json(
            {
                "arguments": arguments,
                "distribution": entry.distribution,
                "documentation": documentation,
                "name": entry.name,
                "object": entry.value,
                "version": entry.version,
            }
        )
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
