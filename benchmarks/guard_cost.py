"""What a training step costs against another checkout: the same model, schedule and batch, two ranks each, in turn."""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ALLOWED = 1.03


def serve(address: str) -> None:
    """Take steps on demand: rank 0 is told through a socket, and tells the others."""
    import torch
    import torch.distributed as dist
    from step_cost import BATCH, HIDDEN, LENGTH, Stack, loss_of, sgd, shard_stack

    import slapo_core as slapo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sch = slapo.create_schedule(Stack(), mesh={"tp": dist.get_world_size()})
    shard_stack(sch)
    engine = slapo.build(sch, optimizer=sgd, loss=loss_of, max_grad_norm=1.0)
    x = torch.randn(BATCH, LENGTH, HIDDEN)
    connection = None
    if dist.get_rank() == 0:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        connection.sendall(b"ready\n")
    while True:
        order = [connection.recv(1).decode() if connection is not None else ""]
        dist.broadcast_object_list(order)
        if order[0] not in ("s", "c"):
            return
        if order[0] == "s":
            start = time.perf_counter()
            engine.train_step(x)
            dist.barrier()
            answer: Any = time.perf_counter() - start
        else:
            answer = _counts(engine, x)
        if connection is not None:
            connection.sendall(json.dumps(answer).encode() + b"\n")


def _counts(engine: Any, x: Any) -> dict[str, int]:
    """What one step runs: collectives by kind, and hooks by table."""
    from torch.profiler import profile

    with profile() as profiler:
        engine.train_step(x)
    found = Counter({event.key: event.count for event in profiler.key_averages() if event.key.startswith("c10d::")})
    for module in engine.module.modules():
        for table in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
            found[table] += len(getattr(module, table))
        found["wrapped forwards"] += "forward" in module.__dict__
    for parameter in engine.module.parameters():
        found["parameter hooks"] += len(parameter._backward_hooks or ()) + len(
            getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
        )
    return dict(found)


class Side:
    """The ranks of one checkout."""

    def __init__(self, python: Path, folder: Path, name: str) -> None:
        address = str(folder / name)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address)
        listening.listen()
        listening.settimeout(300)
        self._process = subprocess.Popen(
            [str(python), __file__, "--serve", address], env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        self._connection = listening.accept()[0].makefile("rwb", buffering=0)
        assert self._connection.readline() == b"ready\n"

    def ask(self, order: bytes) -> Any:
        """``b"s"``: the seconds of a step; ``b"c"``: what it runs."""
        self._connection.write(order)
        return json.loads(self._connection.readline())

    def end(self) -> None:
        self._connection.write(b"q")
        self._process.wait(timeout=60)


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """95 % of the median, by order statistics: no assumption about the distribution."""
    ordered, count = sorted(values), len(values)
    half = 0.98 * count**0.5
    return ordered[max(0, round(count / 2 - half))], ordered[min(count - 1, round(count / 2 + half))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout, with its own .venv")
    parser.add_argument("--pairs", type=int, default=120, help="interleaved pairs of steps (default: %(default)s)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        from slapo_testing import run_ranks

        run_ranks(serve, options.serve, world_size=2, timeout=1800)
        return 0
    if options.against is None:
        parser.error("--against ../an-earlier-checkout")
    from report import save

    with tempfile.TemporaryDirectory() as folder:
        mine = Side(Path(sys.executable), Path(folder), "mine")
        other = Side(options.against / ".venv/bin/python", Path(folder), "other")
        for _ in range(5):
            mine.ask(b"s"), other.ask(b"s")
        ratios = []
        for pair in range(options.pairs):
            first, second = (mine, other) if pair % 2 else (other, mine)
            times = {id(side): side.ask(b"s") for side in (first, second)}
            ratios.append(times[id(mine)] / times[id(other)])
        counts = {"this": mine.ask(b"c"), "other": other.ask(b"c")}
        mine.end()
        other.end()
    low, high = interval_of_median(ratios)
    row = {
        "what": "training step on 2 ranks / that of another checkout",
        "ratio": statistics.median(ratios),
        "interval_95": [low, high],
        "pairs": len(ratios),
        "allowed": ALLOWED,
        "runs": counts,
    }
    print(f"{row['what']}: median {row['ratio']:.3f}, 95 % {low:.3f} to {high:.3f} ({len(ratios)} pairs)")
    for what in sorted(set(counts["this"]) | set(counts["other"])):
        print(f"  {what:<28} {counts['this'].get(what, 0):>4}, the other's {counts['other'].get(what, 0):>4}")
    save("guard_cost", [row])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
