"""What a picture of LLaMA of 70 billion parameters on tp 8 x pp 4 costs: CPU seconds, and bytes of the page.

    OMP_NUM_THREADS=1 python benchmarks/show_cost.py [--layers 80] [--memory] [--write]

The model is on the meta device. Making the schedule, cutting it into stages, and writing its page, for which it is
cut again, are timed in turn, seven times each, on fresh models; the first picture of the process is left out.
``--memory`` adds a page with the estimate, which simulates one rank of each stage in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import resource
import statistics
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from auto_cost import model
from report import save

import slapo_core as slapo
import slapo_models
import slapo_pipeline

MOST_SECONDS, MOST_BYTES, REPEATS = 2.0, 3 * 10**6, 7
ADAMW: Any = functools.partial(torch.optim.AdamW, lr=1e-4)


def scheduled(layers: int, kernels: bool) -> slapo.Schedule:
    ids = torch.zeros(8, 2048, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    schedule = slapo.create_schedule(model(layers), mesh={"pp": 4, "tp": 8}, example_inputs=batch)
    slapo_models.llama(schedule, stages=4, kernels=kernels)
    return schedule


def page(schedule: slapo.Schedule, **arguments: Any) -> int:
    """Write the page, and return its size in bytes."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "page.html"
        schedule.picture(**arguments).save(file)
        return file.stat().st_size


def measured(layers: int, kernels: bool) -> dict[str, Any]:
    """Time schedule and page in turn."""
    page(scheduled(8, kernels))
    times: dict[str, list[float]] = {"schedule": [], "stages": [], "page": []}
    size = steps = 0
    for _ in range(REPEATS):
        begin = time.process_time()
        schedule = scheduled(layers, kernels)
        made = time.process_time()
        slapo_pipeline.stages(schedule)
        cut = time.process_time()
        size, steps = page(schedule), len(schedule.records)
        for name, seconds in (("schedule", made - begin), ("stages", cut - made), ("page", time.process_time() - cut)):
            times[name].append(seconds)
    row: dict[str, Any] = {"layers": layers, "kernels": kernels, "steps": steps, "bytes": size}
    for name, seconds in times.items():
        low, median, high = statistics.quantiles(seconds, n=4)
        row[f"{name}_cpu_seconds"] = {"low": round(low, 2), "median": round(median, 2), "high": round(high, 2)}
    return row


def with_memory(layers: int) -> dict[str, Any]:
    """Make one page with the estimate of a training step."""
    schedule, start = scheduled(layers, kernels=False), time.process_time()
    size = page(schedule, memory=True, optimizer=ADAMW, microbatches=8, title="LLaMA 70B on tp 8 x pp 4")
    own = time.process_time() - start
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._stop()  # so that the time of the processes that it started is counted
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "layers": layers,
        "memory": True,
        "bytes": size,
        "cpu_seconds": round(own + children.ru_utime + children.ru_stime, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--write", action="store_true", help="results/show_cost.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(given.layers, kernels) for kernels in (False, True)]
    for row in rows:
        print(row)
        if row["page_cpu_seconds"]["median"] > MOST_SECONDS or row["bytes"] > MOST_BYTES:
            print(f"MISSED: {MOST_SECONDS} s and {MOST_BYTES:,} bytes")
    if given.memory:
        rows.append(with_memory(given.layers))
        print(rows[-1])
    if given.write:
        save("show_cost", rows)


if __name__ == "__main__":
    main()
