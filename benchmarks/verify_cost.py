"""What ``slapo.verify`` costs: the peak of memory per parameter, and CPU time, against another checkout if given.

Memory: the highest resident set of the process (VmHWM) less its resident set before the model was made, when all that
is imported was (a small model had been verified); so the model itself counts. Bytes for each parameter of the untouched
float32 model, activations included. CPU time: of the caller, the server of processes and all ranks together, in a fresh
process, for one dry ``verify`` of a BERT over two ranks; the second time, the server is there already.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing.forkserver
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HIDDEN, LAYERS, TOKENS = 1024, 10, 4
ALLOWED_BYTES = 56.0
ALLOWED_RATIO = 1.0


def memory_of(hidden: int, layers: int, mesh: dict[str, int] | None) -> tuple[float, float]:
    """Peak bytes and the number of parameters of one verification."""
    import torch

    import slapo_core as slapo

    torch.manual_seed(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    model = torch.nn.Sequential()
    for number in range(layers):
        block = torch.nn.Sequential()
        block.add_module("up", torch.nn.Linear(hidden, hidden))
        block.add_module("act", torch.nn.Tanh())
        block.add_module("down", torch.nn.Linear(hidden, hidden))
        model.add_module(str(number), block)
    count = sum(parameter.numel() for parameter in model.parameters())  # before any is split
    sch = slapo.create_schedule(model, mesh=mesh)
    for number in range(layers):
        if mesh is None:
            sch[f"{number}"].checkpoint()
        else:
            sch[f"{number}.up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
            sch[f"{number}.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    slapo.verify(sch, torch.randn(TOKENS, hidden))
    return _status("VmHWM") - before, count


def measured_memory(mesh: dict[str, int] | None) -> float:
    """Bytes a parameter in this process, after a small model went before."""
    memory_of(16, 2, mesh)
    gc.collect()
    peak, count = memory_of(HIDDEN, LAYERS, mesh)
    return peak / count


def memory_alone() -> list[float]:
    done = subprocess.run(
        [sys.executable, __file__, "--role", "memory"], capture_output=True, text=True, check=True, env=_environment()
    )
    return [float(done.stdout)]


def memory_on_ranks() -> list[float]:
    from slapo_testing import run_ranks

    return list(run_ranks(measured_memory, {"tp": 2}, world_size=2, timeout=600))


def dry_verify() -> dict[str, list[float]]:
    """CPU and wall seconds of a first and a second dry verification in this process."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    import slapo_core as slapo

    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"cpu": [], "wall": []}
    for _ in range(2):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=4096,
            hidden_size=256,
            num_hidden_layers=6,
            num_attention_heads=8,
            intermediate_size=1024,
            max_position_embeddings=128,
        )
        sch = slapo.create_schedule(BertForMaskedLM(config).train(), mesh={"tp": 2})
        for layer in sch["bert.encoder.layer.*"]:
            attention = layer["attention.self"]
            for projection in ("query", "key", "value"):
                attention[projection].shard(["weight", "bias"], axis=0)
            attention.shard_attribute(["num_attention_heads", "all_head_size"])
            attention.sync("bwd_post", "all_reduce")
            layer["attention.output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
            layer["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
            layer["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        sch["bert.encoder.layer.[01]"].checkpoint()
        ids = torch.randint(0, 4096, (2, 96))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.flip(1)}
        cpu, wall = _cpu_of_all(), time.perf_counter()
        slapo.verify(sch, batch, timeout=600)
        found["wall"].append(time.perf_counter() - wall)
        found["cpu"].append(_cpu_of_all() - cpu)
    return found


def compared(checkout: Path | None, pairs: int) -> list[dict[str, Any]]:
    """Rows for a first and a second verification: seconds, and the median of the ratios, pair by pair."""
    sides = {"this": Path(sys.executable)} | ({"other": checkout / ".venv/bin/python"} if checkout else {})
    found: dict[str, list[dict[str, list[float]]]] = {side: [] for side in sides}
    for pair in range(pairs):
        for side in list(sides) if pair % 2 else list(reversed(sides)):
            command = [str(sides[side]), __file__, "--role", "dry"]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment())
            found[side].append(json.loads(done.stdout.splitlines()[-1]))
    rows = []
    for number, what in enumerate(("first dry verify of a process", "second")):
        row: dict[str, Any] = {"what": what, "pairs": pairs, "allowed": ALLOWED_RATIO}
        for clock in ("cpu", "wall"):
            mine = [run[clock][number] for run in found["this"]]
            row[f"{clock}_seconds"] = statistics.median(mine)
            if checkout:
                other = [run[clock][number] for run in found["other"]]
                row[f"{clock}_seconds_of_other"] = statistics.median(other)
                row[f"{clock}_ratio"] = statistics.median(a / b for a, b in zip(mine, other, strict=True))
        rows.append(row)
    return rows


def _cpu_of_all() -> float:
    """Seconds of this process, of the server that forks the ranks, and of all ranks that ended."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    ticks = 0
    if server is not None:
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        ticks = sum(map(int, fields[11:15]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return float(line.split()[1]) * 1024
    raise KeyError(name)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, with its own .venv, for the ratios")
    parser.add_argument("--pairs", type=int, default=3, help="interleaved runs of each (default: %(default)s)")
    parser.add_argument("--role", choices=["memory", "dry"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "memory":
        print(measured_memory(None))
        return
    if options.role == "dry":
        print(json.dumps(dry_verify()))
        return
    from report import save

    rows: list[dict[str, Any]] = [
        {"what": f"memory, {where}", "bytes_per_parameter": max(found), "allowed": ALLOWED_BYTES}
        for where, found in (("one process", memory_alone()), ("live tensor parallel on 2 ranks", memory_on_ranks()))
    ]
    for row in rows:
        print(f"{row['what']:<44} {row['bytes_per_parameter']:.1f} bytes a parameter (allowed {row['allowed']})")
    for row in compared(options.against, options.pairs):
        ratio = f", ratio {row['cpu_ratio']:.2f} CPU, {row['wall_ratio']:.2f} wall" if options.against else ""
        print(f"{row['what']:<44} {row['cpu_seconds']:.1f} s CPU, {row['wall_seconds']:.1f} s wall{ratio}")
        rows.append(row)
    save("verify_cost", rows)


if __name__ == "__main__":
    main()
