"""Cut every architecture of transformers that can be made tiny into stages, and verify them in one process.

python tools/pipeline_zoo.py --only bert gpt2     # these
python tools/pipeline_zoo.py --json p.json        # everything (about 15 minutes of one core)
python tools/pipeline_zoo.py --json p.json --column docs/results/models.md

What p.json holds already is not run again: a run that was stopped goes on. Delete the file to start anew, or the rows
that are to be run again: --again FAILED refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.integration.zoo.pipelines import is_causal_lm
from tests.integration.zoo.running import Row, check_all

COLUMN = "pipeline"
_SIGN = {"ok": "yes", "refused": "refused", "none": "-", "FAILED": "FAILED"}


def main() -> int:
    """Run, print the summary, and end with 1 if anything failed."""
    arguments = _arguments()
    from tests.integration.zoo.subjects import subjects

    known = [each.name for each in subjects()]
    unknown = sorted(set(arguments.only or ()) - set(known))
    if unknown:
        print(f"no such model: {', '.join(unknown)}", file=sys.stderr)
        return 2
    rows = _run(arguments.only or known, Path(arguments.json) if arguments.json else None, again=arguments.again)
    print(summary(rows))
    if arguments.column:
        page = Path(arguments.column)
        page.write_text(with_column(page.read_text(), rows))
    return 1 if any(row.failures for row in rows) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model types, e.g. bert; default: every one")
    parser.add_argument("--json", metavar="FILE", help="keep the results there, and go on with what is missing in it")
    parser.add_argument(
        "--again", nargs="+", choices=list(_SIGN), default=[], help="run those with these results again"
    )
    parser.add_argument("--column", metavar="FILE", help="write the results into the table of docs/results/models.md")
    return parser.parse_args()


def _run(names: Sequence[str], store: Path | None, *, again: Sequence[str]) -> list[Row]:
    from rich.console import Console
    from rich.progress import track

    known: dict[str, Row] = {}
    if store is not None and store.exists():
        known = {each["name"]: Row(**each) for each in json.loads(store.read_text())}
    tasks = [(name, (COLUMN,)) for name in names if name not in known or word(known[name]) in again]
    console = Console(stderr=True)
    for row in track(check_all(tasks, workers=1), "cut and verified", total=len(tasks), console=console):
        known[row.name] = row
        if store is not None:
            store.write_text(json.dumps([dataclasses.asdict(each) for each in known.values()], indent=1))
    return [known[name] for name in names]


def word(row: Row) -> str:
    """``"ok"``, ``"refused"``, ``"none"``, ``"FAILED"``, or ``"skipped"``."""
    if row.skipped is not None:
        return "skipped"
    return row.results[COLUMN].partition(":")[0] if COLUMN in row.results else "FAILED"


def summary(rows: Sequence[Row]) -> str:
    """How many of the causal language models and of the others, and every reason with its models."""
    lines = []
    for title, causal in (("causal language models", True), ("others", False)):
        counts = Counter(word(row) for row in rows if is_causal_lm(row.name) is causal)
        ran = sum(counts.values()) - counts["skipped"]
        lines.append(
            f"{title}: {counts['ok']} of {ran} verified, {counts['refused']} refused, {counts['FAILED']} failed, "
            f"{counts['none']} do not apply; {counts['skipped']} cannot be made"
        )
    for wanted in ("FAILED", "refused", "none"):
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if word(row) == wanted:
                reasons.setdefault(_reason("; ".join(row.results.values())), []).append(row.name)
        found = sorted(reasons.items(), key=lambda item: -len(item[1]))
        lines += ["", f"{wanted}:", *(f"- {len(names)}: {', '.join(names)}: {reason}" for reason, names in found)]
    return "\n".join(lines)


def with_column(page: str, rows: Sequence[Row]) -> str:
    """The page of ``tools/model_zoo.py`` with the column of stages filled in, before the last one (tp)."""
    from tools.model_zoo import _meaning

    by_name = {row.name: row for row in rows}
    lines = [line for line in page.splitlines() if not re.match(rf"(\| {COLUMN} \||- \S+, {COLUMN}: )", line)]
    header = next(number for number, line in enumerate(lines) if line.startswith("| model | class |"))
    fresh = f" {COLUMN} " not in lines[header]
    made: list[str] = []
    for number, line in enumerate(lines):
        cells = line.split("|")
        if number >= header and len(cells) > 4 and line.startswith("|"):
            name = cells[1].strip()
            cell = f" {COLUMN} " if number == header else "---" if number == header + 1 else _cell(by_name.get(name))
            cells[-2:-2] if fresh else None
            cells = [*cells[:-2], cell, *cells[-2:]] if fresh else [*cells[:-3], cell, *cells[-2:]]
            line = "|".join(cells)
        if line.startswith("| tp |"):
            counts = Counter(word(row) for row in rows)
            cells = [str(counts[key]) for key in ("ok", "refused", "none", "FAILED")]
            made.append(f"| {COLUMN} | {' | '.join(cells)} |")
        if line.startswith("- **tp**") and not any("**pipeline**" in each for each in lines):
            meaning = _meaning()
            start = next(index for index, each in enumerate(meaning) if "**pipeline**" in each)
            end = next(index for index, each in enumerate(meaning) if "**tp**" in each)
            made += meaning[start:end]
        made.append(line)
    for title, wanted in (("## Failed", "FAILED"), ("## Refused", "refused")):
        notes = [f"- {row.name}, {COLUMN}: {_line(row)}" for row in rows if word(row) == wanted]
        if not notes:
            continue
        if title not in made:
            place = next((at for at, line in enumerate(made) if line in ("## Refused", "## Left out")), len(made))
            made[place:place] = [title, "", "", ""]
        at = made.index(title) + 2
        made[at:at] = notes
    return "\n".join(made) + "\n"


def _cell(row: Row | None) -> str:
    return "" if row is None or row.skipped is not None else f" {_SIGN[word(row)]} "


def _line(row: Row) -> str:
    text = " ".join(row.results[COLUMN].partition(": ")[2].split()).replace("|", "\\|")
    text = re.sub(r"(\(|at )/\S*site-packages/", r"\1", text)
    return text if len(text) <= 240 else f"{text[:240]}..."


def _reason(text: str) -> str:
    """Without what differs from model to model."""
    text = re.sub(r"\(?\S*\.py:\d+\)?", "", " ".join(text.split()))
    text = re.sub(r"after \S+ and \S+:|after \S+:|#\d+ |'[\w.]+\.\w+'", "_", text)
    return text[:300]


if __name__ == "__main__":
    sys.exit(main())
