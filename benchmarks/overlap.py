"""What ``sync("bwd_post", "all_reduce", overlap=True)`` saves of a training step on two ranks, and when it waits.

Over gloo a reduction computes on the very cores that it should run beside; so each shape is measured once more with a
simulated wire, on which each reduction of a gradient takes a fixed time without computing.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from report import interleaved, ratio_of, save
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_testing import run_ranks

LAYERS = 4
SHAPES = {"wide": (256, 256, 1024), "square": (512, 256, 256)}
"""Tokens, features, and features of the hidden layer."""
SHOWN = ("mm", "all_reduce_", "all_reduce", "wait_tensor")


class Wire(dist.ProcessGroup):
    """All-reduce over another group, ``seconds`` after the start, in a thread of its own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group, self.seconds = group, 0.0
        self.started: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()
        dist.distributed_c10d._register_process_group("wire", self)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        done: torch.futures.Future[Any] = torch.futures.Future()
        self.started.put((tensors, options or dist.AllreduceOptions(), done))
        return torch._C._distributed_c10d._create_work_from_future(done)

    def getBackendName(self) -> str:
        return "wire"

    def _run(self) -> None:
        while True:
            tensors, options, done = self.started.get()
            time.sleep(self.seconds)
            self.group.allreduce(tensors, options).wait()
            done.set_result(tensors)


class Block(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, hidden), nn.Linear(hidden, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


def loss_of(shape: tuple[int, int, int], overlap: bool, *, wire: bool = False) -> Callable[[], torch.Tensor]:
    """A forward, whose backward reduces gradients with or without overlap."""
    tokens, features, hidden = shape
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(features, hidden) for _ in range(LAYERS)])
    sch = slapo.create_schedule(model, mesh={"tp": dist.get_world_size()})
    for block in sch["*"]:
        up = block["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce", overlap=overlap)
        for kind, hook in up.hooks if wire else ():
            assert kind == "forward_pre"
            object.__setattr__(hook.group, "name", "wire")
        block["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    x = torch.randn(tokens, features, requires_grad=True)

    def loss() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        return model(x).square().mean()

    return loss


def step_of(loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        loss().backward()
        dist.barrier()

    return step


def measured(shape: tuple[int, int, int], pairs: int, share: float | None) -> dict[str, Any]:
    """Ratios of wall time: with overlap to without.

    Args:
        shape: of the model.
        pairs: of steps.
        share: of a step that the reductions take on the simulated wire; None: over gloo itself.
    """
    torch.set_num_threads(1)
    wire = Wire(dist.group.WORLD) if share is not None else None
    overlapped, plain = (step_of(loss_of(shape, overlap, wire=wire is not None)) for overlap in (True, False))
    for step in (overlapped, plain):
        step()
    if wire is not None and share is not None:
        times, _ = interleaved(plain, plain, pairs=20, clock=time.perf_counter)
        seconds = torch.tensor(share / (1 - share) * fastest(times) / LAYERS)
        dist.broadcast(seconds, 0)
        wire.seconds = seconds.item()
    times = interleaved(overlapped, plain, pairs=pairs, clock=time.perf_counter)
    taken = None if wire is None else wire.seconds * LAYERS / fastest(times[1])
    return {
        **ratio_of(*times),
        "ratio_of_the_fastest_tenths": fastest(times[0]) / fastest(times[1]),
        "share_of_the_wire": taken,
        "over": "gloo" if wire is None else "wire",
    }


def fastest(times: Sequence[float]) -> float:
    """The tenth percentile: of the steps that others on the machine disturbed least."""
    return statistics.quantiles(times, n=10)[0]


def profiled(shape: tuple[int, int, int]) -> list[str]:
    """Start and end of what runs in one backward, in microseconds, of the first rank's last layer."""
    torch.set_num_threads(1)
    lines = []
    for overlap in (False, True):
        loss = loss_of(shape, overlap)
        step_of(loss)()
        output = loss()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            output.backward()
        events = [event for event in profile.events() if event.name.rpartition(":")[2] in SHOWN]
        events.sort(key=lambda event: event.time_range.start)
        backward, events = events[0].time_range.start, events[:10]
        lines.append("with overlap" if overlap else "without overlap")
        lines += [
            f"  {event.time_range.start - backward:9.0f} to {event.time_range.end - backward:9.0f}  {event.name}"
            for event in events
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200, help="interleaved pairs of steps (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="print when collectives start and end, and measure none")
    options = parser.parse_args()
    if options.profile:
        print("\n".join(run_ranks(profiled, SHAPES["wide"], world_size=2, timeout=600)[0]))
        return
    rows = [
        {"shape": f"{name} {shape}", **run_ranks(measured, shape, options.pairs, share, world_size=2, timeout=600)[0]}
        for name, shape in SHAPES.items()
        for share in (None, 0.2)
    ]
    for row in rows:
        spread = f"quartiles {row['quartile_1']:.3f} to {row['quartile_3']:.3f}, {row['pairs']} pairs"
        print(
            f"{row['shape']:<28} {row['over']:<5} with / without overlap {row['ratio']:.3f} ({spread}), "
            f"of the fastest tenths {row['ratio_of_the_fastest_tenths']:.3f}"
            + (f"; the wire takes {row['share_of_the_wire']:.0%} of a step without" if row["over"] == "wire" else "")
        )
    save("overlap", rows)


if __name__ == "__main__":
    main()
