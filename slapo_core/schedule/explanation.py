"""``sch.explain()``: what each step changed, as text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slapo_core.spec.primitive import Record
from slapo_core.tree.render import fold_numbers

__all__ = ["explain_records"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_DOTTED = re.compile(r"(?<![\w.])(?:\w+\.)+[A-Za-z_]\w*")  # a full name, never a float


def explain_records(records: Sequence[Record]) -> str:
    """One paragraph a step: the call, where, by whom, from which line, and every effect.

    Steps that are the same call with the same effects in repeated layers are shown once:
    ``layer.{0-5}.output.dense (x 6)``.
    """
    if not records:
        return "no steps: the model runs as its author wrote it"
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        # Full names inside an effect carry the layer's number too (tied parameters): fold it there as well.
        effects = tuple(_DOTTED.sub(lambda name: _NUMBER.sub("*", name[0]), effect) for effect in record.effects)
        key = (record.primitive.name, str(record.primitive), _NUMBER.sub("*", record.path), record.location, effects)
        groups.setdefault(key, []).append(record)
    lines: list[str] = []
    for same in groups.values():
        first = same[0]
        numbers = fold_numbers([record.index for record in same])
        times = f" (x {len(same)})" if len(same) > 1 else ""
        lines.append(
            f"#{numbers} {first.primitive} at {_where([record.path for record in same])}{times}"
            f"  [{first.name}, {first.distribution} {first.version}]  {first.location}"
        )
        lines.extend(f"    {effect}" for effect in first.effects)
    return "\n".join(lines)


def _where(paths: list[str]) -> str:
    if len(paths) == 1:
        return f"'{paths[0]}'" if paths[0] else "the root"
    levels = list(zip(*(path.split(".") for path in paths), strict=True))
    shown = []
    count = 1
    for level in levels:
        values = sorted(set(level), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))
        if len(values) == 1:
            shown.append(values[0])
        elif all(value.isdigit() for value in values):
            shown.append("{" + fold_numbers([int(value) for value in values]) + "}")
        else:
            shown.append("{" + ",".join(values) + "}")
        count *= len(values)
    if count != len(paths):  # the braces would promise places that were not meant
        return ", ".join(f"'{path}'" for path in paths)
    return f"'{'.'.join(shown)}'"
