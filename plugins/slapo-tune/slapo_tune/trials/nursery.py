"""Where the ranks of trials are forked from: a process that has imported torch once, and nothing of the user's."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

import slapo_core
from slapo_tune.trials import job as files
from slapo_tune.trials.processes import end_with

__all__ = ["main"]

_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed._functional_collectives",
    "torch.profiler",
    "torch.utils.checkpoint",
    "torch._dynamo",  # by every optimiser
    "slapo_tune.study",
    "slapo_tune.trials.rank",
    "slapo_tune.trials.tasks",
)
_NAMES = ("build", "create_schedule", "replay", "stages", "verify")  # of the core; it imports them when they are used
_TICK = 0.01


def main() -> None:
    """``python -m slapo_tune.trials.nursery DESCRIPTOR GUARD MODULE...``"""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, guard = map(int, sys.argv[1:3])
    end_with(guard)
    line = socket.socket(fileno=descriptor)
    for name in (*_PRELOAD, *sys.argv[3:]):
        with contextlib.suppress(Exception):  # whatever it raises: the ranks that import it again say so
            importlib.import_module(name)
    for name in _NAMES:
        getattr(slapo_core, name)
    gc.collect()
    gc.freeze()
    ranks: dict[int, int] = {}  # by process id
    unread = b""
    while True:
        if select.select([line], [], [], _TICK if ranks else None)[0]:
            data = line.recv(1 << 16)
            if not data:
                return
            *orders, unread = (unread + data).split(b"\n")
            for order in map(json.loads, orders):
                started = _start(order, line)
                ranks |= {pid: rank for rank, pid in enumerate(started)}
                _tell(line, {"pids": started})
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _tell(line, {"rank": ranks.pop(pid), "code": os.waitstatus_to_exitcode(status)})


def _start(order: dict[str, Any], line: socket.socket) -> list[int]:
    """Fork the ranks of a job, into a process group of their own."""
    parent = os.getpid()
    pids: list[int] = []
    for rank in range(order["ranks"]):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)
            end_with(parent)
            line.close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _redirect(order["directory"])
            from slapo_tune.trials.rank import run_rank

            code = 1
            try:
                code = run_rank(order["directory"], rank)
            finally:
                os._exit(code)
        with contextlib.suppress(OSError):  # the rank has done it itself, or has ended
            os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    return pids


def _redirect(directory: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    printed = os.open(files.output(directory), os.O_WRONLY)
    for descriptor, target in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(descriptor, target)
    os.close(nothing)
    os.close(printed)


def _tell(line: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the guard ended, and this process with it
        line.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
