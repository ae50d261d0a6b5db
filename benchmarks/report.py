"""What the benchmarks share: interleaved pairs, their statistics, and where results are kept."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def interleaved(
    first: Callable[[], Any], second: Callable[[], Any], *, pairs: int, clock: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Seconds of ``pairs`` runs of each, in turn; who goes first alternates."""
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        order = ((0, first), (1, second)) if pair % 2 == 0 else ((1, second), (0, first))
        for which, run in order:
            start = clock()
            run()
            times[which].append(clock() - start)
    return times


def ratio_of(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the pairwise ratios first / second."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio": middle, "quartile_1": low, "quartile_3": high, "pairs": len(ratios)}


def save(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write ``results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    setting = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    (RESULTS / f"{name}.json").write_text(json.dumps({**setting, "rows": list(rows)}, indent=2) + "\n")
