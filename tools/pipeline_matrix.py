"""Train cut models on real ranks under every schedule, and compare each with the untouched model in one process.

python tools/pipeline_matrix.py bert t5                   # these
python tools/pipeline_matrix.py --all --json m.json --write docs/pipeline_matrix.md

What m.json holds already is not run again: a run that was stopped goes on. Delete the file to start anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slapo_core.testing import run_ranks
from tests.integration.pipelines.matrix import Cell, cells, run_cells
from tests.integration.pipelines.models import FAMILIES


def main() -> int:
    """Run, print the table, and end with 1 if anything differed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("families", nargs="*", choices=[[], *FAMILIES], help="e.g. bert")
    parser.add_argument("--all", action="store_true", help="every family")
    parser.add_argument("--json", metavar="FILE", help="keep the results there, and go on with what is missing in it")
    parser.add_argument("--write", metavar="FILE", help="write the table there, as Markdown")
    arguments = parser.parse_args()
    store = Path(arguments.json) if arguments.json else None
    rows: list[dict[str, Any]] = json.loads(store.read_text()) if store is not None and store.exists() else []
    for family in FAMILIES if arguments.all else arguments.families:
        done = [Cell(**row["cell"]) for row in rows]
        missing = [cell for cell in cells(family) if cell not in done]
        for world_size, group in groupby(missing, key=lambda cell: cell.world_size):
            rows += _run(family, world_size, list(group))
            if store is not None:
                store.write_text(json.dumps(rows, indent=1) + "\n")
    page = render(rows)
    if arguments.write:
        Path(arguments.write).write_text(page)
    print(page)
    return 1 if any(row["differs"] for row in rows) else 0


def _run(family: str, world_size: int, chosen: list[Cell]) -> list[dict[str, Any]]:
    """In one launch: starting processes takes longer than a run."""
    start = time.monotonic()
    try:
        ranks = run_ranks(run_cells, chosen, world_size=world_size, timeout=1800)
    except Exception as error:  # noqa: BLE001 - it is a row of the table
        ranks = [[([f"{type(error).__name__}: {error}"], 0.0) for _ in chosen]]
    rows = []
    for cell, results in zip(chosen, zip(*ranks, strict=True), strict=True):
        differs = sorted({one for differing, _ in results for one in differing})
        rows.append({"cell": dataclasses.asdict(cell), "differs": differs, "seconds": max(took for _, took in results)})
    failed = sum(bool(row["differs"]) for row in rows)
    print(
        f"{family}, {world_size} ranks: {len(rows)} runs, {failed} differ, {time.monotonic() - start:.0f} s", flush=True
    )
    return rows


def render(rows: list[dict[str, Any]]) -> str:
    """The page."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    ways = list(dict.fromkeys((c["mesh"], c["schedule"], c["stages"], c["count"]) for c in (r["cell"] for r in rows)))
    families = list(dict.fromkeys(row["cell"]["family"] for row in rows))
    by_way = {
        ((c := row["cell"])["family"], c["mesh"], c["schedule"], c["stages"], c["count"]): row["differs"]
        for row in rows
    }
    lines = [
        "# Pipelines held against the untouched model",
        "",
        "Written by `tools/pipeline_matrix.py`. Each run trains a model of eight blocks for three steps in float64 on",
        "real processes (gloo), and evaluates it once; the untouched model does the same in one process, over the same",
        "micro-batches. Compared, to 1e-9, are losses, norms of gradients, the output of the evaluation, and every",
        "tensor of the state dict after the last step. AdamW and SGD with momentum, with and without clipping,",
        "attention masks given and left out. T5 is cut in encoder and decoder; the ResNet has batch norms.",
        "",
        f"{len(rows)} runs, {sum(bool(row['differs']) for row in rows)} of which differ; {versions}.",
        "",
        "| mesh | schedule | stages | micro-batches | " + " | ".join(families) + " |",
        "|---|---|---|---|" + "---|" * len(families),
    ]
    for way in ways:
        signs = []
        for family in families:
            differs = by_way.get((family, *way))
            signs.append("-" if differs is None else "DIFFERS" if differs else "equal")
        lines.append("| " + " | ".join([*map(str, way), *signs]) + " |")
    problems = [(row["cell"], text) for row in rows for text in row["differs"]]
    if problems:
        lines += ["", "## What differs", ""]
        lines += [
            f"- {cell['family']}, {cell['mesh']}, {cell['schedule']}: {' '.join(text.split())[:400]}"
            for cell, text in problems
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
