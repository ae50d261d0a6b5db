"""Hold slapo against a bank of schedules: wrong ones have to be caught and blamed rightly, right ones to pass.

python tools/wrong_schedules.py --kind "forward sync missing"   # one class of mistakes
python tools/wrong_schedules.py --wrong --journal bank.jsonl    # all mistakes; goes on where it was ended
python tools/wrong_schedules.py --all --journal bank.jsonl --write docs/results/wrong-schedules.md
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.integration.bank.right import right_schedules
from tests.integration.bank.running import Result, run_all
from tests.integration.bank.table import page, totals
from tests.integration.bank.wrong import bank, faults, wrong_schedules


def main() -> int:
    """Run, print the totals, and end with 1 if a wrong schedule was missed or a right one refused."""
    arguments = _arguments()
    names = _names(arguments)
    if not names:
        print("no such class; there are:", *(each.name for each in faults()), sep="\n  ", file=sys.stderr)
        return 2
    results = _run(names, Path(arguments.journal) if arguments.journal else None, workers=arguments.workers)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([dataclasses.asdict(each) for each in results], indent=1))
    if arguments.write:
        Path(arguments.write).write_text(page(results))
    for each in results:
        if each.is_wrong_verdict or arguments.verbose:
            print(f"{each.outcome}: {each.name}\n    {each.oracle}")
            if arguments.verbose:
                print("    " + each.text.replace("\n", "\n    "))
    print(totals(results))
    return 1 if any(each.is_wrong_verdict for each in results) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="every schedule, wrong and right")
    parser.add_argument("--wrong", action="store_true", help="every wrong schedule")
    parser.add_argument("--right", action="store_true", help="every right schedule")
    parser.add_argument("--kind", action="append", default=[], metavar="WORDS", help="classes whose name holds these")
    parser.add_argument("--every", action="store_true", help="with --kind: at every place of every model")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="one schedule, by its name")
    parser.add_argument("--journal", metavar="FILE", help="results are kept there, and not made again")
    parser.add_argument("--json", metavar="FILE", help="write all results there")
    parser.add_argument("--write", metavar="FILE", help="write the table there, as Markdown")
    parser.add_argument("--workers", type=int, default=2, help="launches at the same time (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print every result with its message")
    arguments = parser.parse_args()
    if not (arguments.all or arguments.wrong or arguments.right or arguments.kind or arguments.case):
        parser.error("give --all, --wrong, --right, --kind or --case")
    return arguments


def _names(arguments: argparse.Namespace) -> list[str]:
    names = list(arguments.case)
    if arguments.all or arguments.wrong:
        names += bank()
    every = wrong_schedules() if arguments.every else {name: wrong_schedules()[name] for name in bank()}
    names += [name for name, (kind, _) in every.items() if any(words in kind for words in arguments.kind)]
    if arguments.all or arguments.right:
        names += [right.name for right in right_schedules()]
    return list(dict.fromkeys(names))


def _run(names: Sequence[str], journal: Path | None, *, workers: int) -> list[Result]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    order = {name: position for position, name in enumerate(names)}
    results = list(track(run_all(names, journal, workers=workers), "schedules", total=len(names), console=console))
    return sorted(results, key=lambda each: order[each.name])


if __name__ == "__main__":
    sys.exit(main())
