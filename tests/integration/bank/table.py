"""The table of what was caught, and of what was blamed."""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Sequence

from tests.integration.bank.running import CAUGHT, Result
from tests.integration.bank.wrong import faults

__all__ = ["page", "totals"]


def totals(results: Sequence[Result]) -> str:
    """One paragraph of figures."""
    wrong, right = _wrong(results), _right(results)
    caught = [each for each in wrong if each.outcome in CAUGHT]
    blamed = [each for each in caught if each.blame]
    kinds = {each.kind for each in wrong}
    alarms = [each for each in right if each.outcome != "agrees"]
    lines = []
    if wrong:
        lines.append(
            f"{len(wrong)} wrong schedules of {len(kinds)} classes: {_of(len(caught), len(wrong))} refused or caught, "
            f"{_of(len(blamed), len(caught))} of these with the right blame."
        )
    if right:
        lines.append(f"{len(right)} right schedules: {len(alarms)} false alarms.")
    return "\n".join(lines)


def page(results: Sequence[Result]) -> str:
    """The whole page."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "slapo-core")
    )
    wrong = _wrong(results)
    lines = [
        "# Wrong schedules",
        "",
        f"Measured on {datetime.date.today():%Y-%m-%d} with {versions},",
        "on the CPU, by `python tools/wrong_schedules.py --all`.",
        "",
        "Schedules of tiny instances of BERT, GPT-2, LLaMA, Qwen3, T5 and ViT (two layers, sizes that are no powers of",
        "two) on two and four ranks. A wrong one is a right one with one mistake. That a mistake changes a number is",
        "found by plain code that shares nothing with `verify`: outputs, gradients, weights and buffers, in training",
        "and evaluation, over two steps of SGD; or, for dropout and for ranks that block each other, said by hand.",
        "",
        "- **step**: refused when it was written; **build**: refused by `build`, and mostly by `verify` too;",
        "  **verify**: found by `verify` alone; **missed**: trains, wrongly",
        "- **blame**: of a wrong step: it is named, with at most two others; of a missing one: what is named stands at",
        "  its pair of layers, or the call to add is suggested; of a change that no step made: that is said",
        "",
        *totals(results).splitlines(),
        "",
        "| class | what it breaks | cases | step | build | verify | missed | blame |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in faults():
        if each.is_users:
            continue
        own = [result for result in wrong if result.kind == each.name]
        if not own:
            continue
        counts = [sum(result.outcome == outcome for result in own) for outcome in CAUGHT]
        blamed = sum(bool(result.blame) for result in own if result.outcome in CAUGHT)
        cells = [len(own), *counts, len(own) - sum(counts), f"{blamed} of {sum(counts)}"]
        lines.append(f"| {each.name} | {each.breaks} | {' | '.join(map(str, cells))} |")
    for title, chosen in (
        ("Missed", [each for each in wrong if each.outcome not in CAUGHT]),
        ("Blamed otherwise", [each for each in wrong if each.outcome in CAUGHT and not each.blame]),
        ("False alarms", [each for each in _right(results) if each.outcome != "agrees"]),
    ):
        if chosen:
            lines += ["", f"## {title}", "", *(_line(each) for each in chosen)]
    return "\n".join([*lines, *_by_hand(results)]) + "\n"


def _by_hand(results: Sequence[Result]) -> list[str]:
    """What the user did to the reference model too."""
    kinds = {each.name for each in faults() if each.is_users}
    own = [each for each in results if each.kind in kinds]
    if not own:
        return []
    caught = sum(each.outcome in CAUGHT for each in own)
    return [
        "",
        "## Changed by hand",
        "",
        "The reference model is the user's own, without the steps: what the user changes in it by hand after the",
        "schedule was made holds for both, and is no mistake of the schedule. Not counted above:",
        f"{len(own)} such changes of {len({each.kind for each in own})} classes, {caught} of them refused or found:",
        "",
        *(f"- {kind}" for kind in dict.fromkeys(each.kind for each in own)),
    ]


def _wrong(results: Sequence[Result]) -> list[Result]:
    left_out = {"right", *(each.name for each in faults() if each.is_users)}
    return [each for each in results if each.kind not in left_out and each.outcome != "changes nothing"]


def _right(results: Sequence[Result]) -> list[Result]:
    return [each for each in results if each.kind == "right"]


def _of(part: int, whole: int) -> str:
    return f"{part} ({100 * part / whole:.1f} %)" if whole else "none"


def _line(result: Result) -> str:
    said = " ".join((result.oracle or result.text).split()).replace("|", "\\|")
    return f"- {result.name}: {said[:160]}"
