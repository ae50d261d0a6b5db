"""What the benchmarks share: interleaved pairs, their statistics, and where results are kept."""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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


def in_turn(measures: Mapping[str, Callable[[], float]], number: int) -> dict[str, float]:
    """Take each measure once, e.g. seconds of a step; round ``number`` begins elsewhere than the one before."""
    names = list(measures)
    shift = number % len(names)
    return {name: measures[name]() for name in (*names[shift:], *names[:shift])}


def device_seconds(device: torch.device, step: Callable[[], Any], repeats: int = 1) -> float:
    """Seconds of a call, the mean of ``repeats`` in a row: by CUDA events, on a CPU by the clock."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - start) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def ratio_of(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the pairwise ratios first / second."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio": middle, "quartile_1": low, "quartile_3": high, "pairs": len(ratios)}


def ratio_of_medians(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """That of ``first`` to ``second``, and where 95 % of it lie when the pairs are drawn again and again."""
    draw = random.Random(0)
    pairs = len(first)
    ratios = []
    for _ in range(4000):
        chosen = draw.choices(range(pairs), k=pairs)
        ratios.append(statistics.median(first[i] for i in chosen) / statistics.median(second[i] for i in chosen))
    ratios.sort()
    return {
        "ratio": statistics.median(first) / statistics.median(second),
        "interval_95": [ratios[100], ratios[-101]],
        "pairs": pairs,
    }


def save(name: str, rows: Sequence[dict[str, Any]], *, file: Path | None = None, **setting: Any) -> None:
    """Write ``results/<name>.json``, or ``file``; ``setting`` is kept beside date, versions and machine."""
    setting = {
        **setting,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    if file is None:
        RESULTS.mkdir(exist_ok=True)
        file = RESULTS / f"{name}.json"
    part = file.with_name(f".{file.name}.part")  # a process that is killed here leaves the file as it was
    part.write_text(json.dumps({**setting, "rows": list(rows)}, indent=2) + "\n")
    part.replace(file)
