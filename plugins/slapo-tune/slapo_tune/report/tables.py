"""Tables for people: drawn on a terminal, aligned plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["aligned", "print_table"]


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Plain lines, one a row, the headings first.

    Args:
        columns: the headings.
        rows: one text a column.
    """
    clean = [tuple(" ".join(text.split()) for text in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *clean, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in (tuple(columns), *clean)
    ]


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table under a title.

    Args:
        title: one line above it.
        columns: the headings.
        rows: one text a column; none prints nothing.
    """
    if not rows:
        return
    print(f"\n{title}")
    if not sys.stdout.isatty():
        print("\n".join(aligned(columns, rows)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
