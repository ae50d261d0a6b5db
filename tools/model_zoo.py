"""Run slapo over every architecture of transformers that can be made tiny, and over models of torch.nn.

python tools/model_zoo.py bert gpt2           # these
python tools/model_zoo.py --all               # everything (about 20 minutes on 2 cores)
python tools/model_zoo.py --all --json z.json --write docs/results/models.md

What z.json holds already is not run again: a run that was stopped goes on. Delete the file to start anew.

python tools/model_zoo.py --write docs/results/models.md    # only its column `automatic`, from auto_matrix.md there
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.integration.zoo.running import COLUMNS as CHECKED, Row, check_all, split_all

COLUMNS = (*CHECKED, "tp")
AUTOMATIC = "automatic"
_MATRIX = Path(__file__).resolve().parent.parent / "docs" / "results" / "auto_matrix.md"
_COUNTED = ("trace", "flattened")
_SIGN = {"ok": "yes", "refused": "refused", "none": "-", "FAILED": "FAILED"}


def main() -> int:
    """Run, print the table, and end with 1 if anything failed."""
    arguments = _arguments()
    if not arguments.all and not arguments.names:
        written = Path(arguments.write)
        written.write_text(with_automatic(written.read_text(), _MATRIX.read_text()))
        return 0
    from tests.integration.zoo.subjects import subjects

    known = [each.name for each in subjects()]
    unknown = sorted(set(arguments.names) - set(known))
    if unknown:
        print(f"no such model: {', '.join(unknown)}", file=sys.stderr)
        return 2
    names = known if arguments.all else arguments.names
    store = Path(arguments.json) if arguments.json else None
    columns, ranks = arguments.columns, not arguments.no_ranks
    rows = _run(names, columns, workers=arguments.workers, ranks=ranks, store=store)
    page = with_automatic(render(rows), _MATRIX.read_text())
    if arguments.write:
        Path(arguments.write).write_text(page)
    print(page)
    return 1 if any(row.failures for row in rows) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="model types, e.g. bert")
    parser.add_argument("--all", action="store_true", help="every one that is known")
    parser.add_argument("--json", metavar="FILE", help="keep the results there, and go on with what is missing in it")
    parser.add_argument("--write", metavar="FILE", help="write the table there, as Markdown")
    parser.add_argument("--columns", nargs="*", choices=CHECKED, default=CHECKED, help="only these, of one process")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--no-ranks", action="store_true", help="leave tensor parallelism out")
    arguments = parser.parse_args()
    if (arguments.all and arguments.names) or not (arguments.all or arguments.names or arguments.write):
        parser.error("give names of models, or --all, or only --write for the column of automatic schedules")
    return arguments


def _run(names: Sequence[str], columns: Sequence[str], *, workers: int, ranks: bool, store: Path | None) -> list[Row]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    known: dict[str, Row] = {}
    if store is not None and store.exists():
        known = {each["name"]: Row(**each) for each in json.loads(store.read_text())}

    def keep() -> None:
        if store is not None:
            store.write_text(json.dumps([dataclasses.asdict(row) for row in known.values()], indent=1))

    tasks = [(name, _missing(known.get(name), columns)) for name in names]
    tasks = [(name, missing) for name, missing in tasks if missing]
    for row in track(check_all(tasks, workers=workers), "one process", total=len(tasks), console=console):
        before = known.get(row.name)
        if before is not None:
            row.results = {**before.results, **row.results}
        known[row.name] = row
        keep()
    split = [name for name in names if known[name].skipped is None and not name.startswith("torch: ")]
    split = [name for name in split if "tp" not in known[name].results] if ranks else []
    for name, result in track(split_all(split), "two ranks", total=len(split), console=console):
        known[name].results["tp"] = result
        keep()
    return [known[name] for name in names]


def _missing(row: Row | None, columns: Sequence[str]) -> list[str]:
    """The columns that are still to be filled."""
    if row is not None and row.skipped is not None:
        return []
    return [column for column in columns if row is None or column not in row.results]


def render(rows: Sequence[Row]) -> str:
    """The page: totals, the table, what was refused and why, what was skipped and why."""
    run = [row for row in rows if row.skipped is None]
    for row in run:
        if row.name.startswith("torch: "):
            row.results.setdefault("tp", "none: the schedule for two ranks knows the layers of transformers only")
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "slapo-core")
    )
    lines = [
        "# Models",
        "",
        f"Measured on {datetime.date.today():%Y-%m-%d} with {versions},",
        "on the CPU, by `python tools/model_zoo.py --all`.",
        "Every model is a tiny instance (two layers) made from its configuration, with random weights.",
        "",
        *_meaning(),
        "",
        f"{len(run)} models ran, {len(rows) - len(run)} were left out.",
        "",
        "| check | yes | refused, with the reason | does not apply | failed |",
        "|---|---|---|---|---|",
    ]
    for column in COLUMNS:
        counts = Counter(_word(row.results.get(column)) for row in run)
        lines.append(f"| {column} | {counts['ok']} | {counts['refused']} | {counts['none']} | {counts['FAILED']} |")
    lines += ["", "An empty cell was not run."] if any(set(COLUMNS) - set(row.results) for row in run) else []
    lines += ["", f"| model | class | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for row in run:
        cells = [_cell(column, row.results.get(column)) for column in COLUMNS]
        lines.append(f"| {row.name} | {row.model} | {' | '.join(cells)} |")
    for title, words in (("Failed", ("FAILED",)), ("Refused", ("refused",))):
        notes = [
            f"- {row.name}, {column}: {_line(result.partition(': ')[2])}"
            for row in run
            for column, result in row.results.items()
            if _word(result) in words
        ]
        if notes:
            lines += ["", f"## {title}", "", *notes]
    skipped = [f"- {row.name} ({row.model}): {_line(row.skipped or '')}" for row in rows if row.skipped is not None]
    if skipped:
        lines += ["", "## Left out", "", *skipped]
    return "\n".join(lines) + "\n"


def with_automatic(page: str, matrix: str) -> str:
    """Put the shares of automatic schedules into the table of models, by the models' classes.

    Args:
        page: the page of models, with or without the column.
        matrix: the page of automatic schedules.
    """
    cells = [_cells(line) for line in matrix.splitlines() if line.startswith("| ")]
    head = next(row for row in cells if row[:2] == ["model", "class"])
    shares = {row[1]: row[head.index("tp 2")] for row in cells if len(row) == len(head)}
    lines, is_table = [], False
    for line in page.splitlines():
        is_head = line.startswith("| model | class |")
        is_table = line.startswith("|") and (is_table or is_head)
        if is_head and _cells(line)[-1] != AUTOMATIC:
            line += f" {AUTOMATIC} |"
        if is_head:
            columns = len(_cells(line)) - 1
        elif is_table and line.startswith("|---"):
            line = "|---" * (columns + 1) + "|"
        elif is_table:
            row = _cells(line)[:columns]
            line = f"| {' | '.join([*row, shares.get(row[1], '')])} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _meaning() -> list[str]:
    return [
        "- **addresses**: every path of the model is a path of the schedule, before and after its steps",
        "- **checkpoint**: with every repeated block checkpointed, `verify` finds no difference: outputs, gradients,",
        "  buffers and a step of the optimizer, in float64 where the model allows it",
        "- **deep copy**: a copy of the scheduled model runs by itself",
        "- **names, replay**: same names in the state dict; the saved schedule applies to a fresh instance",
        "- **undo**: after `verify` and `undo(to=0)` the model is bit-identical: objects, values, hooks, attributes",
        "- **replace**: a new `nn.Linear` in the place of one gives the same outputs, bit by bit",
        "- **meta build**: made on the meta device and initialized by `build`, it gives the outputs of the plain model",
        "  that loads its state dict",
        "- **state dict**: what the engine saves loads into the plain model (strictly) and into another engine",
        "- **trace**: blocks traced, of all repeated blocks that the batch reaches. With these graphs in place,",
        "  outputs, gradients (of parameters and inputs), buffers and the state of the random numbers are those of the",
        "  reference model, bit by bit: in training and evaluation mode, at the recorded size, with three rows and",
        "  with one, of other lengths (image sizes) where the reference model takes them; *refused*: what was not",
        "  traced, or not at those sizes, with the reason of the error",
        "- **flattened**: the same with `trace(flatten=True)`: child modules are part of the graphs",
        "- **pipeline**: cut after the middle block (an encoder-decoder also after the middle one of each stack), and",
        "  run one stage after the other in one process, `verify` finds no difference: outputs, gradients, buffers",
        "  and a step of the optimizer; *refused*: it cannot be cut there, with the reason",
        "- **tp**: attention and MLP split over two ranks by one generic schedule, found equal by `verify`; a `-` says",
        "  that this schedule does not know the names of the model's layers, `refused` that it is wrong for the model,",
        "  for instance because a norm inside of the attention gets only a part of its gradient, and that a",
        "  precondition or `verify` said so",
        "- **automatic**: of the weights in repeated blocks, the elements that `slapo_models.auto` splits over two",
        "  ranks, where everything is equal, from [the automatic schedule, model by model](auto_matrix.md) by the",
        "  class; an empty cell was not run there",
    ]


def _cell(column: str, result: str | None) -> str:
    if column in _COUNTED and _word(result) in ("ok", "refused"):
        return str(result).partition(": ")[2].partition(";")[0]  # blocks traced, of all
    return "" if result is None else _SIGN.get(_word(result), "-")


def _word(result: str | None) -> str:
    return "missing" if result is None else result.partition(":")[0]


def _line(text: str) -> str:
    one = " ".join(text.split()).replace("|", "\\|")
    one = re.sub(r"(\(|at )/\S*site-packages/", r"\1", one)  # where a library lies is of this machine only
    return one if len(one) <= 240 else f"{one[:240]}..."


if __name__ == "__main__":
    sys.exit(main())
