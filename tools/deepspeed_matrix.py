"""Train scheduled models by DeepSpeed on real ranks, and compare each with the untouched model in one process.

python tools/deepspeed_matrix.py --family bert --only "dp 2, tp 2"   # these
python tools/deepspeed_matrix.py --json m.json --write docs/deepspeed_matrix.md

What m.json holds already is not run again: a run that was stopped goes on. Delete the file to start anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import sys
import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from slapo_core.testing import preload_modules, run_ranks
from tests.integration.deepspeed.cases import Cell, cells
from tests.integration.deepspeed.closeness import GRADIENT, LOSS, WEIGHT
from tests.integration.deepspeed.running import Run, run_cells
from tests.integration.deepspeed.same_file import file_cells
from tests.integration.deepspeed.subjects import MAX_GRAD_NORM, STEPS, SUBJECTS

preload_modules("deepspeed")

Row = dict[str, Any]

INTRODUCTION = f"""Written by `tools/deepspeed_matrix.py`. Each run trains a model of four blocks for {STEPS} steps in
float32 on real processes (gloo) by `slapo.build(sch, target="deepspeed")`, and evaluates it once; the untouched model
does the same in one process, by torch alone. All models have tied embeddings, and attention masks are given; AdamW with
an epsilon of 1e-4; DeepSpeed clips the gradients to {MAX_GRAD_NORM}, less than a half of their norm in every step.
Compared are, relative to the largest element: losses (to {LOSS:.0e}), the norm of all gradients before clipping and
each gradient as `deepspeed.utils.safe_get_full_grad` gives it out ({GRADIENT:.0e}), and every tensor of the state dict
after the last step ({WEIGHT:.0e}): about five times what a sum in another order makes of float32."""

BOTH_TARGETS = """One schedule file - tensor parallelism, parts of graphs replaced and fused, blocks recomputed, and a
cut where the mesh has stages - is replayed under `target="torch"` and under `target="deepspeed"`. The losses of every
step and the state dicts are compared with each other, and with those of the untouched model."""


def main() -> int:
    """Run, print the table, and end with 1 if anything differed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--family", action="append", choices=list(SUBJECTS), help="only this one; may be repeated")
    parser.add_argument("--only", metavar="MESH", help='only this mesh, e.g. "pp 2, tp 2"')
    parser.add_argument("--json", metavar="FILE", help="keep the results there, and go on with what is missing in it")
    parser.add_argument("--write", metavar="FILE", help="write the table there, as Markdown")
    arguments = parser.parse_args()
    families = arguments.family or list(SUBJECTS)
    wanted: list[Run] = [("untouched", cell) for family in families for cell in cells(family)]
    wanted += [("both targets", cell) for cell in file_cells() if cell.family in families]
    wanted = [run for run in wanted if arguments.only in (None, run[1].mesh)]
    if not wanted:
        parser.error(f"nothing runs on the mesh {arguments.only!r}")
    store = Path(arguments.json) if arguments.json else None
    rows: list[Row] = json.loads(store.read_text()) if store is not None and store.exists() else []
    done = [(row["way"], Cell(**row["cell"])) for row in rows]
    missing = [run for run in wanted if run not in done]
    with tqdm(total=len(wanted), initial=len(wanted) - len(missing), unit="run") as bar:
        for (way, family, world_size), group in groupby(missing, key=_launch):
            bar.set_description(f"{family}, {world_size} ranks, {way}")
            chosen = list(group)
            rows += _run(chosen, world_size)
            bar.update(len(chosen))
            if store is not None:
                store.write_text(json.dumps(rows, indent=1) + "\n")
    page = render(rows)
    if arguments.write:
        Path(arguments.write).write_text(page)
    print(page)
    return 1 if any(row["differs"] for row in rows) else 0


def _launch(run: Run) -> tuple[str, str, int]:
    """What runs together: starting processes takes longer than a run."""
    way, cell = run
    return way, cell.family, cell.world_size


def _run(chosen: list[Run], world_size: int) -> list[Row]:
    """In one launch; where it fails, each by itself, so that one does not take the others along."""
    try:
        ranks = run_ranks(run_cells, chosen, world_size=world_size, timeout=600)
    except Exception as error:  # noqa: BLE001 - it is a row of the table
        if len(chosen) > 1:
            return [row for run in chosen for row in _run([run], world_size)]
        ranks = [[([f"{type(error).__name__}: {error}"], 0.0)]]
    rows = []
    for (way, cell), results in zip(chosen, zip(*ranks, strict=True), strict=True):
        differs = sorted({one for differing, _ in results for one in differing})
        seconds = round(max(took for _, took in results), 2)
        rows.append({"way": way, "cell": dataclasses.asdict(cell), "differs": differs, "seconds": seconds})
    return rows


def render(rows: list[Row]) -> str:
    """The page."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("deepspeed", "torch", "transformers")
    )
    differing = sum(bool(row["differs"]) for row in rows)
    lines = [
        "# DeepSpeed held against the untouched model",
        *_paragraph(INTRODUCTION),
        *_paragraph(f"{len(rows)} runs, {differing} of which differ; {versions}."),
        "",
        *_table([row for row in rows if row["way"] == "untouched"]),
        "",
        "## The same file under both targets",
        *_paragraph(BOTH_TARGETS),
        "",
        *_table([row for row in rows if row["way"] == "both targets"]),
    ]
    problems = [(row["cell"], text) for row in rows for text in row["differs"]]
    if problems:
        lines += ["", "## What differs", ""]
        lines += [
            f"- {cell['family']}, {cell['mesh']}, ZeRO-{cell['zero']}: {' '.join(text.split())[:400]}"
            for cell, text in problems
        ]
    return "\n".join(lines) + "\n"


def _paragraph(text: str) -> list[str]:
    return ["", *textwrap.wrap(" ".join(text.split()), 120)]


def _table(rows: list[Row]) -> list[str]:
    """A line for each way to run, a column for each family."""
    families = list(dict.fromkeys(row["cell"]["family"] for row in rows))
    by_way: dict[tuple[str, int, int], dict[str, Row]] = {}
    for row in rows:
        cell = row["cell"]
        by_way.setdefault((cell["mesh"], cell["zero"], cell["micro_batches"]), {})[cell["family"]] = row
    lines = ["| mesh | ZeRO | micro-batches | " + " | ".join(families) + " |", "|---|---|---|" + "---|" * len(families)]
    for way, found in by_way.items():
        signs = ["-" if one is None else "DIFFERS" if one["differs"] else "equal" for one in map(found.get, families)]
        lines.append("| " + " | ".join([*map(str, way), *signs]) + " |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
