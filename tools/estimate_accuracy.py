"""Hold predicted peaks of memory against torch's MemTracker on real tensors, over a hundred schedules.

python tools/estimate_accuracy.py llama resnet          # these families
python tools/estimate_accuracy.py --all --write docs/results/estimate_accuracy.md    # everything (3 minutes)
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slapo_estimate.results import Memory
from slapo_runtime.launcher import run_process
from tests.support.estimate_cases import CASES, FAMILIES, Case
from tests.support.estimate_judge import compare

LIMIT = 0.02
_HEAD = """# Predicted and counted peaks of memory

Written by `tools/estimate_accuracy.py`. Each row is one schedule: the peak over two training steps that
`slapo_core.estimate` predicts without memory, and what torch's `MemTracker` counts for the same steps on real tensors
in a process of the same kind (the "fake" process group, one rank's shards on the CPU). Bytes of tensors, all of them.

MemTracker refuses a second step in one run ("multiple iterative calls"), so that its `reset_mod_stats` is called in
between; within a step it refuses several forward passes (`accumulate`), and frozen parameters ("cannot register a hook
on a tensor that doesn't require gradient"). It hooks every module; where a module is hooked, slapo-tp sums an output
out of place, as it must for a hook that keeps the partial sum, and no training run has these hooks. In these rows, and
with `tp` above 1, MemTracker runs without its tracker of modules, which it needs only to tell its categories apart.

`where` is the module that ran at the peak, or whose backward pass did, and the phase.

"""


def main() -> int:
    """Run, print the page, and end with 1 if a peak is further off than 2 %."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("families", nargs="*", metavar="family", help=", ".join(FAMILIES))
    parser.add_argument("--all", action="store_true", help="every one")
    parser.add_argument("--write", metavar="FILE", help="write the page there, as Markdown")
    given = parser.parse_args()
    if given.all == bool(given.families) or set(given.families) - set(FAMILIES):
        parser.error(f"name some of {', '.join(FAMILIES)}, or --all")
    rows: list[tuple[Case, Memory, int]] = []
    for family in given.families or FAMILIES:
        cases = [case for case in CASES if case.family == family]
        found = run_process(compare, cases, timeout=1800.0)
        rows.extend((case, memory, peak) for case, (memory, peak) in zip(cases, found, strict=True))
    page = render(rows)
    print(page)
    if given.write:
        Path(given.write).write_text(page)
    return 1 if any(abs(_off(memory, peak)) > LIMIT for _, memory, peak in rows) else 0


def render(rows: list[tuple[Case, Memory, int]]) -> str:
    """The page."""
    worst = max(abs(_off(memory, peak)) for _, memory, peak in rows)
    exact = sum(memory.total == peak for _, memory, peak in rows)
    lines = [
        f"{len(rows)} schedules: {exact} peaks are equal to the byte, the worst is {worst:.3%} off.",
        "",
        "| model | tp | checkpointed | dtype | optimizer | batch x length | else | predicted | counted | off | where |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, memory, peak in rows:
        where = f"{memory.phase}, `{memory.module}`" if memory.module not in ("", "optimizer") else memory.phase
        shape = f"{case.batch} x {case.length}"
        lines.append(
            f"| {case.family} | {case.tp} | {case.checkpointed} | {case.dtype} | {case.optimizer} | {shape} "
            f"| {_more(case)} | {memory.total:,} | {peak:,} | {_off(memory, peak):.3%} | {where} |"
        )
    return _HEAD + "\n".join(lines) + "\n"


def _off(memory: Memory, peak: int) -> float:
    return (memory.total - peak) / peak


def _more(case: Case) -> str:
    if case.family == "resnet":  # it has no masks, heads or embeddings
        found = [f"accumulate={case.accumulate}"] if case.accumulate > 1 else []
        return ", ".join([*found, "frozen first convolution"] if case.frozen else found)
    found = [f"mask: {case.mask}"] if case.mask != "none" else []
    found += ["untied"] if not case.tied else []
    found += [f"{case.kv_heads} kv heads"] if case.kv_heads != 8 else []
    found += ["eager attention"] if case.attention == "eager" else []
    found += [f"accumulate={case.accumulate}"] if case.accumulate > 1 else []
    found += ["frozen embeddings"] if case.frozen else []
    return ", ".join(found)


if __name__ == "__main__":
    sys.exit(main())
