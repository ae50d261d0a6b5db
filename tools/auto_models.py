"""Judge the automatic schedule over causal language models and other architectures, models of torch.nn, and odd ones.

python tools/auto_models.py "causal: llama" "other: vit"     # these, on 2 ranks
python tools/auto_models.py --all --json a.json              # everything, on 2 ranks (about 40 minutes on 2 cores)
python tools/auto_models.py --all --ranks 2 4 --json a.json --write docs/results/auto_matrix.md

What a.json holds already is not run again: a run that was stopped goes on. --retry runs again what was not equal, or
split for less than three quarters. Delete the file to start again.
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

from tests.integration.zoo.automatic import Judgment, judge_all
from tests.integration.zoo.automatic_cases import SCHEDULES, cases, drawn

ENOUGH = 0.75
_CAUSAL, _OTHERS = 144, 60
_SHOWN = ("causal", "encoder", "encoder-decoder", "vision", "audio", "experts", "torch", "odd")
Key = tuple[str, int]


def main() -> int:
    """Run, print the table, and end with 1 if a schedule was wrong without an error."""
    arguments = _arguments()
    unknown = sorted(set(arguments.names) - set(cases()))
    if unknown:
        print(f"no such model: {', '.join(unknown)}", file=sys.stderr)
        return 2
    names = list(cases()) if arguments.all else arguments.names
    names = [name for name in names if name.startswith(tuple(arguments.only))]
    rows = _run(names, arguments)
    page = render(rows, arguments.schedule)
    if arguments.write:
        Path(arguments.write).write_text(page)
    print(page)
    return 1 if any(row.result.startswith("WRONG") for row in rows) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help='cases, e.g. "causal: llama"')
    parser.add_argument("--all", action="store_true", help="every one that is known")
    parser.add_argument("--only", nargs="*", default=[""], metavar="PREFIX", help='e.g. "causal:"')
    parser.add_argument("--ranks", nargs="*", type=int, default=[2], help="sizes of tp (default: 2)")
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="auto", help="default: %(default)s")
    parser.add_argument("--verify", type=int, default=0, metavar="N", help="let slapo.verify look at every N-th too")
    parser.add_argument("--no-run", action="store_true", help="only print the table of what --json holds")
    parser.add_argument("--retry", action="store_true", help="run again what was not equal, or hardly split")
    parser.add_argument("--json", metavar="FILE", help="keep the results there, and go on with what is missing in it")
    parser.add_argument("--write", metavar="FILE", help="write the table there, as Markdown")
    arguments = parser.parse_args()
    if arguments.all == bool(arguments.names):
        parser.error("give names of models, or --all")
    return arguments


def _run(names: Sequence[str], arguments: argparse.Namespace) -> list[Judgment]:
    from rich.console import Console
    from rich.progress import track

    store = Path(arguments.json) if arguments.json else None
    known: dict[Key, Judgment] = {}
    if store is not None and store.exists():
        rows = [Judgment(**each) for each in json.loads(store.read_text())]
        known = {(row.name, row.ranks): row for row in rows}
    verified = names[:: arguments.verify] if arguments.verify else ()
    for ranks in () if arguments.no_run else arguments.ranks:
        missing = [name for name in names if _is_missing(known.get((name, ranks)), arguments.retry)]
        judged = judge_all(missing, ranks, arguments.schedule, verified=verified)
        console = Console(stderr=True)
        for row in track(judged, f"{ranks} ranks", total=len(missing), console=console):
            known[row.name, row.ranks] = row
            if store is not None:
                written = store.with_suffix(".new")
                written.write_text(json.dumps([dataclasses.asdict(each) for each in known.values()], indent=1))
                written.replace(store)
    return [known[name, ranks] for name in names for ranks in arguments.ranks if (name, ranks) in known]


def _is_missing(row: Judgment | None, retry: bool) -> bool:
    if row is None:
        return True
    return retry and row.skipped is None and not (row.result == "equal" and row.share >= ENOUGH)


def render(rows: Sequence[Judgment], schedule: str) -> str:
    """The page: totals, the table, what is wrong, what was left whole and why, what was skipped and why."""
    ran = [row for row in rows if row.skipped is None]
    sizes = sorted({row.ranks for row in rows})
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "slapo-core")
    )
    option = "" if schedule == "auto" else f" --schedule {schedule}"
    lines = [
        "# The automatic schedule, model by model",
        "",
        f"Measured on {datetime.date.today():%Y-%m-%d} with {versions},",
        f"on the CPU over gloo, by `python tools/auto_models.py --all{option}`.",
        "Every model is a tiny instance (two layers) made from its configuration, with random weights.",
        "Rows are kept between runs of the tool, and may come from several commits.",
        "",
        *_meaning(),
        "",
        *_totals(ran, sizes),
    ]
    unknown = set(cases()) - {row.name for row in rows}
    lines += ["", f"{len(unknown)} of the {len(cases())} cases were not run."] if unknown else []
    lines += ["", f"| model | class | kind | {' | '.join(f'tp {size}' for size in sizes)} | collectives | steps |"]
    lines += ["|---" * (len(sizes) + 5) + "|"]
    by_name: dict[str, dict[int, Judgment]] = {}
    for row in ran:
        by_name.setdefault(row.name, {})[row.ranks] = row
    for name, found in by_name.items():
        one = next(iter(found.values()))
        cells = [_cell(found.get(size)) for size in sizes]
        steps = sum(one.steps.values())
        lines.append(
            f"| {name.partition(': ')[2]} | {one.model} | {one.kind} | {' | '.join(cells)} | {_sent(one)} | {steps} |"
        )
    for title, word in (("Wrong", "WRONG"), ("Raises when it runs", "raises"), ("No schedule", "no schedule")):
        notes = [f"- {row.name}, tp {row.ranks}: {_line(row.result)}" for row in ran if row.result.startswith(word)]
        lines += ["", f"## {title}", "", *notes] if notes else []
    lines += ["", "## Left whole", "", *_reasons([row for row in ran if row.ranks == sizes[0]])]
    skipped = {row.name: f"- {row.name} ({row.model}): {_line(row.skipped or '')}" for row in rows if row.skipped}
    lines += ["", "## Left out", "", *skipped.values()] if skipped else []
    return "\n".join(lines) + "\n"


def _meaning() -> list[str]:
    return [
        "- **tp n**: elements of weights that are split over n ranks, of all parameters with two axes or more in",
        "  repeated blocks that get a gradient (routers and others too). The number is shown where everything on every",
        "  rank, in float64 and without dropout, is the reference model's: gathered parameters; in training the",
        "  outputs, all gradients (of parameters and inputs) and buffers at three sizes, one of them a single row;",
        "  the loss from labels and its gradients; outputs in evaluation, also with padding and from a cache; the",
        "  parameters after three steps of AdamW. Experts whose products know no float64 are compared in float32. The",
        "  comparison does not use `verify`. Attention is transformers' `eager` on 2 ranks, and `sdpa`, where a model",
        "  has it, on more.",
        "- **collectives**: forward + backward a call of a repeated block, the largest, measured in a training step;",
        "  behind it sums of gradients of small parameters that every rank has (`sync_gradient`). Megatron-LM's number",
        "  for attention and MLP is 2+2, with experts 2+3 (the gradient of the router's weights), with shared experts",
        "  3+4, with a cross-attention 3+4.",
        "- **steps**: of the schedule.",
    ]


def _totals(ran: Sequence[Judgment], sizes: Sequence[int]) -> list[str]:
    lines = [
        f"| tp | models | ran | equal | wrong | raises | no schedule | split ≥ {ENOUGH:.0%} | Megatron's number |",
        "|---" * 9 + "|",
    ]
    for size in sizes:
        own = [row for row in ran if row.ranks == size]
        causal = [row for row in own if row.kind == "causal"]
        others = [row for row in own if row.name.startswith("other: ")]
        chosen = set(drawn({row.name: row.kind for row in others}, _OTHERS))
        groups = {
            "causal language models": causal,
            f"the first {_CAUSAL} of them": causal[:_CAUSAL],
            "other architectures": others,
            f"{_OTHERS} of them, of every kind": [row for row in others if row.name in chosen],
            **{f"other: {kind}": [row for row in others if row.kind == kind] for kind in _SHOWN},
            "torch.nn": [row for row in own if row.kind == "torch"],
            "odd models": [row for row in own if row.kind == "odd"],
            "traps, where a split is wrong": [row for row in own if row.kind == "trap"],
        }
        for title, group in groups.items():
            if group:
                counts = Counter(row.result.partition(":")[0] for row in group)
                split = [row for row in group if row.result == "equal" and row.share >= ENOUGH]
                few = sum(all(map(int.__le__, row.collectives, row.megatron)) for row in split)
                numbers = [counts[word] for word in ("equal", "WRONG", "raises", "no schedule")]
                lines.append(
                    f"| {size} | {title} | {len(group)} | {' | '.join(map(str, numbers))} | {len(split)} | {few} |"
                )
    return lines


def _cell(row: Judgment | None) -> str:
    if row is None:
        return ""
    return f"{row.share:.0%}" if row.result == "equal" else row.result.partition(":")[0]


def _sent(row: Judgment) -> str:
    forward, backward, gradients = row.collectives
    return f"{forward}+{backward}" + (f" (+{gradients})" if gradients else "")


def _reasons(ran: Sequence[Judgment]) -> list[str]:
    """Each reason, with the models and one of the places."""
    found: dict[str, dict[str, str]] = {}
    for row in ran:
        for path, reason in row.left_whole.items():
            found.setdefault(re.sub(r"'[^']*'|\d+", "..", reason), {}).setdefault(row.name, f"`{path}`: {reason}")
    ordered = sorted(found.values(), key=len, reverse=True)
    return [
        f"- {len(models)} models, e.g. {next(iter(models))}, {_line(models[next(iter(models))])}" for models in ordered
    ]


def _line(text: str) -> str:
    one = " ".join(text.split()).replace("|", "\\|")
    one = re.sub(r"(\(|at )/\S*site-packages/", r"\1", one)  # where a library lies is of this machine only
    return one if len(one) <= 240 else f"{one[:240]}..."


if __name__ == "__main__":
    sys.exit(main())
