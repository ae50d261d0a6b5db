"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence


def print_json(value: object) -> None:
    """Print ``value`` with sorted keys, so that equal installations give equal text; infinity and NaN as text."""
    print(json.dumps(_finite(value), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False))


def _finite(value: object) -> object:
    """Replace numbers that JSON does not have by their names."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, with rich on a terminal, else as aligned plain text.

    Args:
        columns: the headings.
        rows: one text a column.
    """
    rows = [tuple(map(_one_line, row)) for row in rows]
    if sys.stdout.isatty():
        _print_rich(columns, rows)
        return
    print("\n".join(table_lines(columns, rows)))


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as aligned plain text.

    Args:
        columns: the headings.
        rows: one text a column.
    """
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    ]


def _one_line(text: str) -> str:
    """Remove line breaks and control characters, which a plugin's files may contain."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
