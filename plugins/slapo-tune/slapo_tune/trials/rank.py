"""One rank of a trial: prepares itself, does its task, and says what came of it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from slapo_tune.trials import job as files
from slapo_tune.trials.failures import described

__all__ = ["is_in_trial", "run_rank"]

_WAITING = 30.0  # seconds that a rank that is done waits for the others, so that none of them sees it leave
_IN_TRIAL = "SLAPO_TUNE_RANK"


def is_in_trial() -> bool:
    """Whether this process is a rank of a trial."""
    return _IN_TRIAL in os.environ


def run_rank(directory: str, rank: int) -> int:
    """The process's exit code; a file says more.

    Args:
        directory: of the job.
        rank: of this process.
    """
    job = files.read(Path(directory, "job.json"))
    assert job is not None
    own = os.getpid()
    trace = os.open(files.trace(directory, rank), os.O_WRONLY | os.O_CREAT)
    faulthandler.enable(trace)
    faulthandler.register(signal.SIGUSR1, trace, all_threads=False)
    phase = ["prepare"]
    try:
        said = _run(job, rank, phase)
    except BaseException as error:  # noqa: BLE001 - told in the file, SystemExit and the like too
        said = described(error, phase[0])
    if os.getpid() != own:
        os._exit(1)  # a process that the user's code forked came back as well: it is not the rank
    files.write(files.result(directory, rank), {**said, "rank": rank, "at": time.monotonic()})
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the user's code closed it
            stream.flush()
    if said["outcome"] == "raised":
        return 1
    patience = time.monotonic() + _WAITING
    others = [files.result(directory, other) for other in range(job["ranks"])]
    while time.monotonic() < patience and not all(file.exists() for file in others):
        time.sleep(0.005)
    return 0


def _run(job: Mapping[str, Any], rank: int, phase: list[str]) -> dict[str, Any]:
    _set_environment(job, rank)
    with contextlib.suppress(OSError, ValueError):
        os.mkdir(Path(job["directory"], "tmp"))
    import torch

    from slapo_tune.trials.sending import opened
    from slapo_tune.trials.tasks import TASKS, Task

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    functions = opened(Path(job["payload"]).read_bytes())
    device = None
    if job["task"] != "check":
        device = _device(job["settings"]["accelerator"], job["ranks"], rank)
        phase[0] = "join"
        _join(job, rank, device)
    limit = job["settings"].get("process_memory")
    if limit is not None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + limit, used + limit))
    torch.manual_seed(job["settings"]["seed"])
    return TASKS[job["task"]](Task(functions, job["settings"], device, phase))


def _set_environment(job: Mapping[str, Any], rank: int) -> None:
    os.environ.clear()
    os.environ.update({key: value for key, value in job["environment"].items() if not key.startswith("TORCHELASTIC_")})
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), _IN_TRIAL: str(rank)})
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update({"WORLD_SIZE": str(job["ranks"]), "LOCAL_WORLD_SIZE": str(job["ranks"])})
    os.environ["TMPDIR"] = str(Path(job["directory"], "tmp"))
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:  # all ranks are on this machine, whose name need not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", min(loopback))


def _device(accelerator: str, ranks: int, rank: int) -> str:
    if accelerator == "cpu":
        return "cpu"
    import torch

    if (count := torch.cuda.device_count()) < ranks:
        raise RuntimeError(f"{ranks} ranks need as many GPUs, and there are {count}; accelerator='cpu' takes the CPU")
    return f"cuda:{rank}"


def _join(job: Mapping[str, Any], rank: int, device: str) -> None:
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if device != "cpu":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        init_method=Path(job["directory"], "store").as_uri(),
        rank=rank,
        world_size=job["ranks"],
        timeout=timedelta(seconds=job["timeout"] + 60),  # the guard ends a rank that hangs, and shows where it stood
    )
