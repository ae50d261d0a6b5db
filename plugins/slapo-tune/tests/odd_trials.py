"""A study whose points do what trials must survive: each does another thing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slapo_tune import Run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().mean()


def batch(p: Any) -> torch.Tensor:
    if p["does"] == "batch_raises":
        raise ValueError("no such batch")
    return torch.full((4, 8), float("inf")) if p["does"] == "loss_is_infinite" else torch.randn(4, 8)


def schedule(sch: Any, p: Any) -> None:
    if p["does"] == "is_refused":
        sch["first"].shard("weight", axis=7)
    if p["does"] == "schedule_raises":
        raise KeyError("there is no such ratio")
    if p["does"] == "only_rank_1_is_refused" and torch.distributed.is_initialized() and sch.mesh.global_rank == 1:
        raise ValueError("not on rank 1")


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def evaluate(run: Run) -> Any:
    does = run.point["does"]
    function = globals().get(f"does_{does}")
    return 1.0 if function is None else function(run)


def does_train(run: Run) -> float:
    return run.train()


does_loss_is_infinite = does_train


def does_loss_differs(run: Run) -> float:
    run.measured["loss"] = 1.0 + run.rank
    return 1.0


def does_nan(run: Run) -> float:
    return float("nan")


def does_none(run: Run) -> None:
    return None


def does_text(run: Run) -> str:
    return "12.5"


def does_only_rank_0(run: Run) -> float | None:
    return 5.0 if run.rank == 0 else None


def does_disagree(run: Run) -> float:
    return 1.0 + 9 * run.rank


def does_rank_1_raises(run: Run) -> float:
    if run.rank == 1:
        raise ValueError("the kernel does not take 7 heads")
    torch.distributed.barrier()
    return 1.0


def does_rank_1_leaves(run: Run) -> float:
    if run.rank == 1:
        os._exit(0)
    torch.distributed.barrier()
    return 1.0


def does_exits(run: Run) -> float:
    sys.exit(0)


def does_segfault(run: Run) -> float:
    ctypes.string_at(0)
    return 1.0


def does_killed(run: Run) -> float:
    if run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()
    return 1.0


def does_kills_its_group(run: Run) -> float:
    os.killpg(0, signal.SIGKILL)
    return 1.0


def does_no_memory(run: Run) -> float:
    torch.empty(1 << 50)
    return 1.0


def does_typed_no_memory(run: Run) -> float:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def does_eats_memory(run: Run) -> float:
    kept = []
    while True:
        kept.append(torch.ones(1 << 22))


def does_prints(run: Run) -> float:
    for _ in range(64):
        os.write(1, os.urandom(1 << 14))
    print("\x00}{\udcff".encode(errors="surrogateescape"), file=sys.stderr)
    return 2.0


def does_closes_its_streams(run: Run) -> float:
    sys.stdout.close()
    sys.stderr.close()
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    return 3.0


def does_leaves_processes(run: Run) -> float:
    left_behind(run)
    return 4.0


def does_thread_without_end(run: Run) -> float:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return 4.5


def does_hang(run: Run) -> float:
    left_behind(run)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(1000)


def left_behind(run: Run) -> None:
    """A process that ignores SIGTERM, one of its child in a session of its own, and shared memory."""
    where = Path(os.environ["ODD_TRIALS_PUT"])
    shared = shared_memory.SharedMemory(create=True, size=64)
    (where / f"{os.getpid()}.shm").write_text(shared.name)
    (where / f"{os.getpid()}.tmp").write_text(os.environ["TMPDIR"])
    script = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork() or os.setsid(); "
    script += "open(os.path.join(os.sys.argv[1], f'{os.getpid()}.pid'), 'w'); time.sleep(1000)"
    subprocess.Popen([sys.executable, "-c", script, str(where)])
    while len(list(where.glob("*.pid"))) < 2:
        time.sleep(0.01)


def does_fork_and_both_go_on(run: Run) -> float:
    os.fork()
    time.sleep(0.2)
    return 6.0 if os.getppid() == PARENT else 7.0


def does_kills_the_server(run: Run) -> float:
    torch.distributed.barrier()
    if run.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    return 1.0


PARENT = os.getppid()
