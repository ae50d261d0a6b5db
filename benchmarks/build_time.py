"""What building BERT-large from the meta device on two ranks costs, against drawing as many random numbers once."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from report import ratio_of, save
from schedule_cost import shard_bert
from transformers import BertConfig, BertForMaskedLM

import slapo_core as slapo
from slapo_testing import run_ranks

RANKS = 2
ALLOWED_RATIO, ALLOWED_GIB = 1.3, 1.1
CONFIG = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def scheduled() -> slapo.Schedule:
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig(**CONFIG))
    sch = slapo.create_schedule(model, mesh={"tp": dist.get_world_size()})
    shard_bert(sch)
    return sch


def elements() -> int:
    """Of the whole model, tied ones once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in BertForMaskedLM(BertConfig(**CONFIG)).parameters())


def clocked(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of CPU time of this process, and on the wall."""
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return time.process_time() - cpu, time.perf_counter() - wall


def times(pairs: int) -> dict[str, list[float]]:
    """On every rank: a build and one draw of all elements, in turn; who goes first alternates."""
    torch.set_num_threads(1)
    count = elements()
    found: dict[str, list[float]] = {"build_cpu": [], "build_wall": [], "draw_cpu": [], "draw_wall": []}

    def build() -> None:
        sch = scheduled()
        gc.collect()
        dist.barrier()
        cpu, wall = clocked(lambda: slapo.build(sch, optimizer=adamw))
        found["build_cpu"].append(cpu)
        found["build_wall"].append(wall)

    def draw() -> None:
        gc.collect()
        dist.barrier()
        cpu, wall = clocked(lambda: torch.empty(count).normal_())
        found["draw_cpu"].append(cpu)
        found["draw_wall"].append(wall)

    build()
    draw()
    found = {name: [] for name in found}
    for pair in range(pairs):
        for run in (build, draw) if pair % 2 == 0 else (draw, build):
            run()
    return found


def peak() -> float:
    """GiB of memory that a rank's process held at most, of all that it did: importing, scheduling and building."""
    torch.set_num_threads(1)
    engine = slapo.build(scheduled(), optimizer=adamw)
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    assert not any(parameter.is_meta for parameter in engine.module.parameters())
    return int(line.split()[1]) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="of a build and a draw (default: %(default)s)")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for rank, found in enumerate(run_ranks(times, options.pairs, world_size=RANKS, timeout=1800)):
        for clock in ("cpu", "wall"):
            build, draw = found[f"build_{clock}"], found[f"draw_{clock}"]
            row = {"what": "build / one normal_ over all elements", "rank": rank, "clock": clock}
            median = {"build_s": sorted(build)[len(build) // 2], "draw_s": sorted(draw)[len(draw) // 2]}
            rows.append({**row, "allowed": ALLOWED_RATIO, **ratio_of(build, draw), **median})
            last = rows[-1]
            print(
                f"rank {rank}, {clock:<4} time: build {last['build_s']:.2f} s, one normal_ {last['draw_s']:.2f} s, "
                f"ratio {last['ratio']:.2f} (quartiles {last['quartile_1']:.2f} to {last['quartile_3']:.2f}, "
                f"{last['pairs']} pairs; allowed {ALLOWED_RATIO})"
            )
    for rank, gib in enumerate(run_ranks(peak, world_size=RANKS, timeout=600)):
        print(f"rank {rank}, most memory: {gib:.2f} GiB (allowed {ALLOWED_GIB})")
        rows.append({"what": "most memory of a rank's process", "rank": rank, "gib": gib, "allowed_gib": ALLOWED_GIB})
    save("build_time", rows)


if __name__ == "__main__":
    main()
