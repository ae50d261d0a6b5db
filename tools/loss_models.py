"""Take the loss of transformers' models from hidden states by one line, and compare with the plain models.

python tools/loss_models.py causal/llama masked/bert           # these
python tools/loss_models.py --all --json m.json --write docs/results/loss_matrix.md

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
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from tests.integration.zoo.losses import KINDS, LossRow, cases, compare_all

RANKS = (1, 2)
INTRODUCTION = """Written by `tools/loss_models.py`. Each model is a tiny instance made from its configuration, in
float64 where it runs so (`float()` keeps float64), with an odd vocabulary where its configuration has one size, and
with some labels ignored. Its schedule is one line, `sch[head].linear_cross_entropy()`, with the head of
`get_output_embeddings()`; on two ranks (gloo) its weight and bias are split along the vocabulary before, by
`shard(..., axis=0, pad=True)`, and the tied embedding with them. Compared with the plain model are the loss and every
gradient of a training step, its other outputs, and the logits of an evaluation with and without labels: to 1e-12 of the
largest element, or to 2e-4 where the model computes its loss in float32."""
WORDS = """*loss*: the loss was taken from the hidden states, and nothing computed logits in training. *logits*: logits
were computed, and everything else is equal. *unused*: the model does not call its head. *refused*: at the step, or
where the model runs, with an error. *WRONG*: something differs."""
TOTALS = ["", "| models | run | loss, on 1 and 2 ranks | otherwise | WRONG |", "|---|---|---|---|---|"]
COLUMNS = ["", "| model | class | head | type | tp 1 | tp 2 |", "|---|---|---|---|---|---|"]


def main() -> int:
    """Run, print the page, and end with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="kind/model type, e.g. causal/llama")
    parser.add_argument("--all", action="store_true", help="every one that is known")
    parser.add_argument("--json", metavar="FILE", help="keep the results there, and go on with what is missing in it")
    parser.add_argument("--write", metavar="FILE", help="write the page there, as Markdown")
    options = parser.parse_args()
    if options.all == bool(options.names):
        parser.error("give names of models, or --all")
    unknown = sorted(set(options.names) - set(cases()))
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}")
    store = Path(options.json) if options.json else None
    rows: dict[str, LossRow] = {}
    if store is not None and store.exists():
        for key, fields in json.loads(store.read_text()).items():
            results = {int(ranks): result for ranks, result in fields.pop("results").items()}
            rows[key] = LossRow(**fields, results=results)
    names = list(cases()) if options.all else options.names
    for ranks in RANKS:
        missing = [
            name for name in names if name not in rows or not (rows[name].skipped or ranks in rows[name].results)
        ]
        for row in tqdm(compare_all(missing, ranks), total=len(missing), desc=f"tp {ranks}"):
            known = rows.setdefault(f"{row.kind}/{row.name}", row)
            known.results.update(row.results)
            if store is not None:
                store.write_text(json.dumps({key: dataclasses.asdict(one) for key, one in rows.items()}, indent=1))
    page = render([rows[name] for name in names])
    if options.write:
        Path(options.write).write_text(page)
    print(page)
    return 1 if any(word(result) == "WRONG" for name in names for result in rows[name].results.values()) else 0


def word(result: str) -> str:
    """The cell of a result."""
    found = result.partition(":")[0]
    return "refused" if found == "raises" else found


def render(rows: Sequence[LossRow]) -> str:
    """The page: totals, what is not taken from hidden states and why, the table, and what did not run."""
    ran = [row for row in rows if row.skipped is None]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    lines = ["# The loss of real models from hidden states", *_paragraph(f"{INTRODUCTION} {versions}.")]
    lines += [
        *_paragraph(WORDS),
        "",
        "| models | run | loss, on 1 and 2 ranks | otherwise | WRONG |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = [row for row in ran if row.kind == kind]
        taken = sum({word(one) for one in row.results.values()} == {"loss"} for row in of_kind)
        wrong = sum("WRONG" in map(word, row.results.values()) for row in of_kind)
        lines.append(f"| {kind} | {len(of_kind)} | {taken} | {len(of_kind) - taken - wrong} | {wrong} |")
    lines += ["", "## Not from hidden states", ""]
    for row in ran:
        others = {ranks: result for ranks, result in row.results.items() if result != "loss"}
        for result in dict.fromkeys(others.values()):
            on = " and ".join(str(ranks) for ranks in others if others[ranks] == result)
            lines += _item(f"{row.kind}/{row.name}, {on} rank{'' if on == '1' else 's'}: {result}")
    for kind in KINDS:
        lines += [
            "",
            f"## Models, {kind}",
            "",
            "| model | class | head | type | tp 1 | tp 2 |",
            "|---|---|---|---|---|---|",
        ]
        for row in ran:
            if row.kind == kind:
                cells = " | ".join(word(row.results.get(ranks, "-")) for ranks in RANKS)
                lines.append(f"| {row.name} | {row.model} | `{row.head}` | {row.dtype} | {cells} |")
    lines += ["", "## Not counted", *_paragraph("No tiny instance can be made, or the plain model does not run."), ""]
    for row in rows:
        if row.skipped is not None:
            lines += _item(f"{row.kind}/{row.name}: {row.skipped}")
    return "\n".join(lines) + "\n"


def _paragraph(text: str) -> list[str]:
    return ["", *textwrap.wrap(" ".join(text.split()), 120, break_on_hyphens=False)]


def _item(text: str) -> list[str]:
    text = " ".join(text.split()).replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")
    return textwrap.wrap(f"- {text}", 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


if __name__ == "__main__":
    sys.exit(main())
