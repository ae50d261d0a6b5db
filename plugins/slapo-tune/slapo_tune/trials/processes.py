"""Processes that end with others, and the end of all that a trial started."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

import psutil

__all__ = ["adopt_orphans", "end_all", "end_with", "kills_for_memory"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_TRACKER = "multiprocessing.resource_tracker"
_GROUPS = "/sys/fs/cgroup"
_PATIENCE = 60.0  # seconds for what gives back shared memory when its owners are gone, and may just be starting


def adopt_orphans() -> None:
    """Become the parent of all processes below this one whose own parent ends, whatever session they made."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends.

    Args:
        parent: its process id; if it is gone already, this process ends at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return  # processes that make sessions of their own can outlive a trial there
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def end_all(keep: Collection[int], *, patience: float = 10.0) -> tuple[list[str], list[str]]:
    """Kill every process below this one.

    Args:
        keep: ids of those that stay.
        patience: seconds for the kernel to end them.

    Returns:
        the command lines of those killed, and of those that could not be.
    """
    killed: dict[int, str] = {}
    pids: set[int] = set()
    deadline = time.monotonic() + patience
    trackers_until = time.monotonic() + _PATIENCE
    while True:
        left = [process for process in psutil.Process().children(recursive=True) if process.pid not in keep]
        left = [process for process in left if _is_alive(process) and not _is_tracker_of(process, keep)]
        _reap(keep)
        if not left or time.monotonic() > deadline:
            break
        waits = False
        for process in left:
            command = _command(process)
            pids.add(process.pid)
            if _TRACKER in command and time.monotonic() < trackers_until:
                waits, deadline = True, time.monotonic() + patience
                continue
            killed.setdefault(process.pid, command)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.05 if waits else 0.005)
    for pid in pids:
        _drop_shared_memory(pid)
    return list(killed.values()), [_command(process) for process in left]


def kills_for_memory() -> int:
    """How many processes of this control group the kernel has killed for want of memory; 0 where that is unknown."""
    group = ""
    with contextlib.suppress(OSError, IndexError):
        group = Path("/proc/self/cgroup").read_text().split("0::", 1)[1].splitlines()[0]
    for file in (f"{_GROUPS}{group}/memory.events", f"{_GROUPS}/memory/memory.oom_control", "/proc/vmstat"):
        with contextlib.suppress(OSError):
            lines = [line.split() for line in Path(file).read_text().splitlines()]
            return sum(int(line[1]) for line in lines if line[0] == "oom_kill")
    return 0


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_tracker_of(process: psutil.Process, keep: Collection[int]) -> bool:
    """Whether it gives back the shared memory of a process that stays."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.ppid() in keep and _TRACKER in _command(process)
    return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200] or process.name()
    except psutil.Error:
        return f"process {process.pid}"


def _reap(keep: Collection[int]) -> None:
    """Take the exit status of adopted processes; of those in ``keep``, whoever started them does."""
    for process in psutil.Process().children():
        if process.pid not in keep:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _drop_shared_memory(pid: int) -> None:
    """What torch shares tensors through has the name of its process, and nobody else to remove it."""
    for file in glob.glob(f"/dev/shm/torch_{pid}_*"):
        with contextlib.suppress(OSError):
            os.unlink(file)
