"""What the tools of all matrices share: run cells on real ranks, keep what came out, and write the page."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tqdm import tqdm

from slapo_testing import run_ranks
from tests.integration.cells import Cell, run_cells

__all__ = ["Page", "Table", "main"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A line for each way to run, a column for each family.

    Args:
        cells: all of them.
        columns: which fields of a cell say the way, by their headings, e.g. ``{"mesh": "mesh", "ZeRO": "zero"}``.
        heading: of its section; None for the first one.
        introduction: a paragraph above it.
        say: what a field is shown as, by its name, where that is not the text of its value.
    """

    cells: Sequence[Cell]
    columns: Mapping[str, str]
    heading: str | None = None
    introduction: str = ""
    say: Mapping[str, Callable[[Any], str]] = dataclasses.field(default_factory=dict)

    def way(self, cell: Cell) -> tuple[str, ...]:
        return tuple(self.say.get(field, str)(getattr(cell, field)) for field in self.columns.values())


@dataclass(frozen=True)
class Page:
    """What a tool writes.

    Args:
        title: its heading.
        introduction: a paragraph.
        tables: in their order.
        packages: whose versions are named.
    """

    title: str
    introduction: str
    tables: Sequence[Table]
    packages: Sequence[str]


def main(
    page: Page, description: str, timeout: float = 600.0, *, prepare: Callable[[Sequence[Any]], None] | None = None
) -> int:
    """Run what the command line asks for, print the page, and give 1 if anything differed.

    Args:
        page: of the tool.
        description: for ``--help``.
        timeout: of a launch of ranks, in seconds.
        prepare: called with the cells that are about to run.
    """
    everything = [cell for table in page.tables for cell in table.cells]
    families = list(dict.fromkeys(cell.family for cell in everything))
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--family", action="append", choices=families, help="only this one; may be repeated")
    parser.add_argument("--only", metavar="MESH", help='only this mesh, e.g. "pp 2, tp 2"')
    parser.add_argument("--json", metavar="FILE", help="keep the results there, and go on with what is missing in it")
    parser.add_argument("--write", metavar="FILE", help="write the page there, as Markdown")
    options = parser.parse_args()
    wanted = [
        cell for cell in everything if cell.family in (options.family or families) and options.only in (None, cell.mesh)
    ]
    if not wanted:
        parser.error(f"nothing runs on the mesh {options.only!r}")
    store = Path(options.json) if options.json else None
    rows: list[Row] = json.loads(store.read_text()) if store is not None and store.exists() else []
    missing = [cell for cell in wanted if _found(rows, cell) is None]
    if missing and prepare is not None:
        prepare(missing)
    with tqdm(total=len(wanted), initial=len(wanted) - len(missing), unit="run") as bar:
        for (kind, family, world_size), group in groupby(missing, key=_launch):
            bar.set_description(f"{kind}, {family}, {world_size} ranks")
            chosen = list(group)
            rows += _run(chosen, world_size, timeout)
            bar.update(len(chosen))
            if store is not None:
                store.write_text(json.dumps(rows, indent=1) + "\n")
    text = render(page, rows)
    if options.write:
        Path(options.write).write_text(text)
    print(text)
    return 1 if any(row["differs"] for cell in wanted if (row := _found(rows, cell)) is not None) else 0


def _launch(cell: Cell) -> tuple[str, str, int]:
    """What runs together: starting processes takes longer than a run."""
    return type(cell).__name__, cell.family, cell.world_size


def _key(cell: Cell) -> Row:
    """As it is kept."""
    kept: Row = json.loads(json.dumps({"kind": type(cell).__name__, **dataclasses.asdict(cell)}))
    return kept


def _found(rows: Sequence[Row], cell: Cell) -> Row | None:
    key = _key(cell)
    return next((row for row in rows if row["cell"] == key), None)


def _run(chosen: list[Cell], world_size: int, timeout: float) -> list[Row]:
    """In one launch; where it fails, each by itself, so that one does not take the others along."""
    try:
        ranks = run_ranks(run_cells, chosen, world_size=world_size, timeout=timeout)
    except Exception as error:  # noqa: BLE001 - it is a row of the table
        if len(chosen) > 1:
            return [row for cell in chosen for row in _run([cell], world_size, timeout)]
        ranks = [[([f"{type(error).__name__}: {error}"], 0.0)]]
    rows = []
    for cell, results in zip(chosen, zip(*ranks, strict=True), strict=True):
        differs = sorted({one for differing, _ in results for one in differing})
        seconds = round(max(took for _, took in results), 2)
        rows.append({"cell": _key(cell), "differs": differs, "seconds": seconds})
    return rows


def render(page: Page, rows: Sequence[Row]) -> str:
    """The page, of what has run."""
    shown = [[(cell, row) for cell in table.cells if (row := _found(rows, cell)) is not None] for table in page.tables]
    results = [result for found in shown for result in found]
    differing = sum(bool(row["differs"]) for _, row in results)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in page.packages)
    lines = [f"# {page.title}", *_paragraph(page.introduction)]
    lines += _paragraph(f"{len(results)} runs, {differing} of which differ; {versions}.")
    for table, found in zip(page.tables, shown, strict=True):
        if found:
            lines += ["", f"## {table.heading}"] if table.heading else []
            lines += _paragraph(table.introduction) if table.introduction else []
            lines += ["", *_lines(table, found)]
    problems = [f"- {cell}: {' '.join(text.split())[:400]}" for cell, row in results for text in row["differs"]]
    if problems:
        lines += ["", "## What differs", "", *problems]
    return "\n".join(lines) + "\n"


def _paragraph(text: str) -> list[str]:
    return ["", *textwrap.wrap(" ".join(text.split()), 120, break_on_hyphens=False)]


def _lines(table: Table, found: Sequence[tuple[Cell, Row]]) -> list[str]:
    families = list(dict.fromkeys(cell.family for cell, _ in found))
    by_way: dict[tuple[str, ...], dict[str, Row]] = {}
    for cell, row in found:
        by_way.setdefault(table.way(cell), {})[cell.family] = row
    headings = [*table.columns, *families]
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for way, of_families in by_way.items():
        signs = [
            "-" if one is None else "DIFFERS" if one["differs"] else "equal" for one in map(of_families.get, families)
        ]
        lines.append("| " + " | ".join([*way, *signs]) + " |")
    return lines
