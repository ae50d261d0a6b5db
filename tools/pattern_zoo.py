"""Look for the ready patterns of slapo-fusion in every architecture of transformers that can be made tiny.

python tools/pattern_zoo.py bert gpt2           # these
python tools/pattern_zoo.py --all               # everything (about 10 minutes on 2 cores)
python tools/pattern_zoo.py --all --write docs/results/patterns.md
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.integration.zoo.operations import OPERATIONS
from tests.integration.zoo.patterns import REPLACED, PatternRow, look_at_all


def main() -> int:
    """Run, print the page, and end with 1 if a replacement was not right."""
    arguments = _arguments()
    from tests.integration.zoo.subjects import subjects

    known = [each.name for each in subjects() if not each.name.startswith("torch: ")]
    unknown = sorted(set(arguments.names) - set(known))
    if unknown:
        print(f"no such model: {', '.join(unknown)}", file=sys.stderr)
        return 2
    names = known if arguments.all else arguments.names
    from rich.console import Console
    from rich.progress import track

    looked = track(look_at_all(names, workers=arguments.workers), total=len(names), console=Console(stderr=True))
    rows = sorted(looked, key=lambda row: row.name)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    page = render(rows)
    if arguments.write:
        Path(arguments.write).write_text(page)
    print(page)
    return 1 if any(row.verified not in ("", "ok") for row in rows) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="model types, e.g. bert")
    parser.add_argument("--all", action="store_true", help="every one that is known")
    parser.add_argument("--json", metavar="FILE", help="write all results there")
    parser.add_argument("--write", metavar="FILE", help="write the page there, as Markdown")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.all == bool(arguments.names):
        parser.error("give names of models, or --all")
    return arguments


def render(rows: Sequence[PatternRow]) -> str:
    """The page: totals, the table, what was missed and why, what was not replaced and why."""
    looked = [row for row in rows if row.skipped is None]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    lines = [
        "# Where the patterns are found",
        "",
        f"Measured with {versions} by `python tools/pattern_zoo.py {'--all' if len(rows) > 300 else 'NAMES'}`.",
        "Every model is a tiny instance made from its configuration, with eager attention; every block of it is",
        "traced with `flatten=True`. How often an operation is *there* is a crude count of tell-tale nodes of graphs",
        "that uses nothing of the matcher (`tests/integration/zoo/operations.py`), in whatever form it is written.",
        "",
        f"{len(looked)} models were looked at, {len(rows) - len(looked)} were not: no tiny instance of them can be",
        "made and run, or none of their blocks traced. Of a few, some blocks only.",
        "",
        "| pattern | found, all of them | some of them | none, though it is there | matches | replaced and verified |",
        "|---|---|---|---|---|---|",
    ]
    for name in OPERATIONS:
        counts = [row.found[name] for row in looked if name in row.found]
        every = sum(1 for found, there in counts if found and found >= there)
        some = sum(1 for found, there in counts if 0 < found < there)
        none = sum(1 for found, there in counts if not found and there)
        right = sum(1 for row in looked if name in row.replaced and row.verified == "ok")
        total = sum(1 for row in looked if name in row.replaced)
        matches = sum(found for found, _ in counts)
        replaced = f"{right} of {total} models" if name in REPLACED else "-"
        lines.append(f"| `{name}` | {every} models | {some} | {none} | {matches} | {replaced} |")
    lines += ["", "## Missed", "", "The nearest miss says what stands in the way.", ""]
    for name in OPERATIONS:
        reasons: dict[str, list[str]] = {}
        for row in looked:
            if name in row.missed:
                reasons.setdefault(_general(row.missed[name]), []).append(row.name)
        lines += [f"- `{name}`: {', '.join(models)}: {reason}" for reason, models in reasons.items()]
    lines += ["", "## Found, and not replaced", ""]
    for name in REPLACED:
        reasons = {}
        for row in looked:
            if name in row.refused:
                reasons.setdefault(_why_not(row.refused[name]), []).append(row.name)
        lines += [f"- `{name}`: {', '.join(models)}: {reason}" for reason, models in reasons.items()]
    wrong = [f"- {row.name}: {_general(row.verified)}" for row in looked if row.verified not in ("", "ok")]
    if wrong:
        lines += ["", "## Replaced, and refused by verify", "", *wrong]
    short = [name.partition(".")[2] for name in OPERATIONS]
    lines += ["", "## Model by model", "", "Found / there.", "", f"| model | {' | '.join(short)} | verified |"]
    lines.append("|---" * (len(short) + 2) + "|")
    for row in looked:
        if row.found:
            cells = ["{}/{}".format(*row.found[name]) if name in row.found else "" for name in OPERATIONS]
            lines.append(f"| {row.name} | {' | '.join(cells)} | {'ok' if row.verified == 'ok' else '-'} |")
    return "\n".join(lines) + "\n"


def _why_not(reason: str) -> str:
    if "the match gives 2 values" in reason:
        return "a value inside of the match (the attention weights) leaves the block too: trace the module around it"
    return _general(reason)


def _general(reason: str) -> str:
    """Without what differs from model to model."""
    return re.sub(r"\s*\(modeling_\w+\.py:\d+\)", "", reason).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
