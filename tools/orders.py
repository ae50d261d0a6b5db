"""Hold primitives in any order against the reference model: every ordered pair of them, and schedules drawn at random.

python tools/orders.py --pairs --draws 2000 --json orders.jsonl --write docs/results/orders.md
python tools/orders.py --draws 200 --seed 5000 --tp 2        # other ones, on two ranks only

What orders.jsonl holds already is not run again: a run that was stopped goes on. Delete the file to start anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.integration.orders.drawing import SIZES, Draw, draw
from tests.integration.orders.pairs import MUST_WORK, NAMES, RELATIONS, Pair, pairs
from tests.integration.orders.running import Result, preload, run

Found = Mapping[str, Result]

INTRODUCTION = """Written by `tools/orders.py`. A schedule is *verified* where its saved form, replayed on real ranks
(gloo), agrees with the reference model: outputs, gradients and a step of the optimizer in float64, and `undo` gives the
model back. It is *refused* where a step raises, when it is written. What is accepted and other than the reference model
is *wrong*; an error later (at `replay`, at a call, in `verify`) is *broken*."""

PAIRS = """On a layer of OPT, two ranks: the row's step, then the column's. `ok` is verified, `(ok)` accepted and not
verified yet, a number is a refusal below, `-` has no place. A `shard` comes with its `sync`, and steps that two need (a
trace for a pattern, the rest of a split) stand before and after them."""

DRAWS = """One-layer models; 3 to 8 units of all primitives, places and arguments, drawn without asking for any
precondition. A unit is a step, or steps that are right together (a `shard` and its `sync`, a pair of split layers);
those of different units are interleaved. 4 of 10 draws take some steps back and apply them again in another order. A
pattern is drawn with the trace in whose graph it is looked for. Drawn again, and counted apart, is what is not right
for the plain model."""


def main() -> int:
    """Run what the command line asks for, print the page, and give 1 if anything was wrong, broken, or refused in
    spite of the promise."""
    options = _arguments()
    asked = list(pairs()) if options.pairs else []
    sizes = tuple(options.tp) if options.tp else SIZES
    drawn = [draw(seed, sizes=sizes) for seed in range(options.seed, options.seed + options.draws)]
    store = Path(options.json) if options.json else None
    found = _read(store)
    wanted = [pair.draw for pair in asked] + drawn
    done = ("accepted",) if not options.verify else ()
    missing = [each for each in wanted if each.name not in found or found[each.name].outcome == "accepted" not in done]
    _run(missing, found, store, verify=options.verify)
    text = page(asked, drawn, found)
    if options.write:
        Path(options.write).write_text(text)
    print(text)
    return (
        1
        if any(found[each.name].outcome in ("wrong", "broken") for each in wanted) or broken_promises(asked, found)
        else 0
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", action="store_true", help="every ordered pair of primitives")
    parser.add_argument("--draws", type=int, default=0, metavar="N", help="so many schedules drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them (default: %(default)s)")
    parser.add_argument("--tp", type=int, action="append", help="only this size of the mesh; may be repeated")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="only apply them, without ranks")
    parser.add_argument("--json", metavar="FILE", help="results are kept there, one a line, and not made again")
    parser.add_argument("--write", metavar="FILE", help="write the page there, as Markdown")
    options = parser.parse_args()
    if not (options.pairs or options.draws):
        parser.error("give --pairs, --draws N, or both")
    return options


def _run(draws: Sequence[Draw], found: dict[str, Result], store: Path | None, *, verify: bool) -> None:
    from tqdm import tqdm

    preload()
    with tqdm(total=len(draws), unit="schedule") as bar:
        for result in run(draws, verify=verify):
            found[result.name] = result
            bar.update()
            if store is not None:
                with store.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def _read(store: Path | None) -> dict[str, Result]:
    if store is None or not store.exists():
        return {}
    rows = [json.loads(line) for line in store.read_text().splitlines()]
    return {row["name"]: Result(**{**row, "before": tuple(row["before"])}) for row in rows}


def broken_promises(asked: Iterable[Pair], found: Found) -> list[Pair]:
    """Pairs that must work, and are refused."""
    return [
        pair
        for pair in asked
        if (pair.first, pair.second) in MUST_WORK and found[pair.draw.name].outcome not in ("verified", "accepted")
    ]


# -- the page ---------------------------------------------------------------------------------------------------------


def page(asked: Sequence[Pair], drawn: Sequence[Draw], found: Found) -> str:
    """What came out, as Markdown."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    lines = ["# Primitives in any order", *_paragraph(INTRODUCTION), "", f"{versions}, on the CPU."]
    if drawn:
        lines += ["", "## Drawn schedules", *_paragraph(DRAWS), *_drawn(drawn, found)]
    if asked:
        lines += ["", "## Ordered pairs", *_paragraph(PAIRS), *_pairs(asked, found)]
    return "\n".join(lines) + "\n"


def _drawn(drawn: Sequence[Draw], found: Found) -> list[str]:
    lines = ["", "| family | drawn | verified | refused | wrong | broken at a call |", "|---|---|---|---|---|---|"]
    groups = {f"{each.family}, tp {each.tp}": (each.family, each.tp) for each in drawn}
    rows = {label: [found[one.name] for one in drawn if (one.family, one.tp) == key] for label, key in groups.items()}
    for label, results in [*sorted(rows.items()), ("all", [found[each.name] for each in drawn])]:
        counts = Counter(result.outcome for result in results)
        lines.append(
            f"| {label} | {len(results)} | {_share(counts['verified'] or counts['accepted'], results)} "
            f"| {_share(counts['refused'], results)} | {counts['wrong']} | {counts['broken']} |"
        )
    again = Counter(reason for each in drawn for reason in each.invalid)
    lines += _paragraph("Units drawn again: " + "; ".join(f"{count} for {what}" for what, count in again.most_common()))
    results = [found[each.name] for each in drawn]
    lines += _table("refused because", [each.reason for each in results if each.outcome == "refused"])
    for outcome in ("wrong", "broken"):
        lines += [
            line
            for each in results
            if each.outcome == outcome
            for line in _paragraph(f"- {outcome}, {each.name}: {' '.join(each.text.split())[:400]}")
        ]
    return lines


def _table(heading: str, reasons: Sequence[str]) -> list[str]:
    if not reasons:
        return []
    rows = [f"| {_cell(reason)} | {count} |" for reason, count in Counter(reasons).most_common()]
    return ["", f"| {heading} | schedules |", "|---|---|", *rows]


def _pairs(asked: Sequence[Pair], found: Found) -> list[str]:
    lines: list[str] = []
    notes: dict[str, tuple[int, list[Pair]]] = {}
    for relation, words in RELATIONS.items():
        cells = {(pair.first, pair.second): pair for pair in asked if pair.relation == relation}
        lines += ["", f"### {words[0].upper()}{words[1:]}", "", f"| | {' | '.join(NAMES)} |", "|---" * 19 + "|"]
        for first in NAMES:
            signs = []
            for second in NAMES:
                pair = cells.get((first, second))
                result = found[pair.draw.name] if pair is not None else None
                if pair is None or result is None:
                    signs.append("-")
                elif result.outcome in ("verified", "accepted"):
                    signs.append("ok" if result.outcome == "verified" else "(ok)")
                else:
                    key = result.reason if result.outcome == "refused" else f"{result.outcome.upper()}: {result.reason}"
                    number, those = notes.setdefault(key, (len(notes) + 1, []))
                    those.append(pair)
                    signs.append(str(number))
            lines.append(f"| **{first}** | {' | '.join(signs)} |")
    counts = Counter(found[pair.draw.name].outcome for pair in asked)
    promised = [pair for pair in asked if (pair.first, pair.second) in MUST_WORK]
    kept = len(promised) - len(broken_promises(asked, found))
    lines += ["", "### Refusals"]
    lines += _paragraph(
        f"{len(asked)} pairs: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        + f". Of {len(promised)} that must work {kept} do."
    )  # fmt: skip
    lines += ["", "| | reason | the order that works |", "|---|---|---|"]
    for key, (number, those) in notes.items():
        works = [pair for pair in those if pair.other_way in found and found[pair.other_way].outcome in _WORKS]
        what = "the other one" if len(works) == len(those) else f"the other one, of {len(works)} of {len(those)} pairs"
        lines.append(f"| {number} | {_cell(key)} | {what if works else 'none: one of the two only'} |")
    return lines


_WORKS = ("verified", "accepted")


def _share(count: int, results: Sequence[Result]) -> str:
    return f"{count} ({count / max(len(results), 1):.0%})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _paragraph(text: str) -> list[str]:
    if text.startswith("- "):
        return textwrap.wrap(" ".join(text.split()), 120, break_on_hyphens=False, subsequent_indent="  ")
    return ["", *textwrap.wrap(" ".join(text.split()), 120, break_on_hyphens=False)]


if __name__ == "__main__":
    sys.exit(main())
