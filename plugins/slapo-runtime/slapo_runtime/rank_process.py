"""Run one rank process of `slapo_runtime.launcher`, and import modules in the server of these processes."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from slapo_core.errors import LaunchError

SERVER_MODULES = "SLAPO_RANK_SERVER_MODULES"
"""The environment variable with the modules to import, set for the server alone."""


@dataclass(frozen=True)
class Job:
    """The instructions of a run for every rank.

    Args:
        payload: the pickled ``(function, args, kwargs)``.
        origin: the name and the file of the function's module; None without a file.
        world_size: the number of ranks.
        backend: of ``torch.distributed.init_process_group``; empty for no process group.
        timeout: seconds for the entire run.
        directory: private to the run, for the store and the tracebacks.
        environment: the caller's environment variables.
    """

    payload: bytes
    origin: tuple[str, str] | None
    world_size: int
    backend: str
    timeout: float
    directory: str
    environment: Mapping[str, str]


class ServerWithCudaError(LaunchError):
    """A preloaded module initialized CUDA in the server of the rank processes."""


def trace_file(directory: Path, rank: int) -> Path:
    """Return the file for a rank's traceback at a crash or forced end."""
    return directory / f"rank-{rank}.traceback"


def describe(function: Callable[..., Any]) -> str:
    """Return the function's full name for messages, e.g. ``'tests.core.test_launcher.add'``."""
    name = getattr(function, "__qualname__", None)
    return repr(function) if name is None else f"'{function.__module__}.{name}'"


def origin(function: Callable[..., Any]) -> tuple[str, str] | None:
    """Return the name and file of a function's module, for its import."""
    name = getattr(function, "__module__", None)
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    return None if name in (None, "__main__") or file is None else (str(name), os.path.abspath(file))


def run_rank(rank: int, connection: Connection, job: Job) -> None:
    """Join the group, call the function, report, and stay until the caller closes the connection.

    A finished rank keeps its group open until then, so that no other rank loses the connection before its own result
    or error.
    """
    os.setpgrp()  # which the caller ends
    _leave_with_the_caller()
    with trace_file(Path(job.directory), rank).open("w") as trace:
        faulthandler.enable(trace)
        # Chained to the default action: the traceback is written even inside a blocking collective, then the
        # process ends, which tells the caller that the file is complete.
        faulthandler.register(signal.SIGUSR1, trace, all_threads=True, chain=True)
        try:
            function, args, kwargs = _prepare(rank, job)
            _send(connection, "called")
            result = function(*args, **kwargs)
            connection_message = _result_message(result)
        except BaseException as error:  # noqa: BLE001 - sent to the caller, SystemExit and the like too
            _send(connection, "failed", _format(error), _portable(error))
            _wait_for_release(connection)
            os._exit(1)
        connection.send_bytes(connection_message)
        _wait_for_release(connection)
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR1)


def _prepare(rank: int, job: Job) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    _set_environment(rank, job)
    if _initializes_cuda is not None:
        raise ServerWithCudaError(
            f"module {_initializes_cuda!r} initializes CUDA at its import in the server of the ranks: a forked "
            "process cannot use CUDA then",
            hint=f"from slapo_runtime.launcher import never_preload; never_preload({_initializes_cuda!r}) before the "
            "first call in a new process: every rank then imports it itself",
        )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    take_device(rank, job.backend)
    if job.backend:
        dist.init_process_group(
            job.backend,
            init_method=Path(job.directory, "store").as_uri(),
            rank=rank,
            world_size=job.world_size,
            # Longer than the run: the caller ends a hung rank, and shows its traceback.
            timeout=timedelta(seconds=job.timeout + 60),
        )
    if job.origin is not None:
        make_importable(*job.origin)
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = pickle.loads(job.payload)
    return call


def take_device(rank: int, backend: str) -> None:
    """Select a rank's GPU, which ranks may share, if the backend is for GPUs."""
    import torch

    # Not for plain gloo, whose ranks may use the CPU only: it would create a context on every GPU.
    if backend not in ("", "gloo", "mpi") and torch.accelerator.is_available():
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())


def _set_environment(rank: int, job: Job) -> None:
    # The server of this process may have been started with other variables than the caller has now.
    os.environ.clear()
    os.environ.update({k: v for k, v in job.environment.items() if not k.startswith("TORCHELASTIC_")})
    os.environ.update(
        OMP_NUM_THREADS="1",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
    )
    # All ranks are on this machine: the loopback device needs no host name that resolves.
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", min(loopback))


def make_importable(name: str, file: str) -> None:
    """Import the function's module by name, or else from its file."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
    else:
        found = getattr(module, "__file__", None)
        if found is not None and os.path.abspath(found) == file:
            return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {name!r} from {file}")
    parent = name.rpartition(".")[0]
    while parent:  # unpickling imports every parent of a dotted name
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(parent)
        sys.modules.setdefault(parent, ModuleType(parent))
        parent = parent.rpartition(".")[0]
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _send(connection: Connection, *message: object) -> None:
    connection.send_bytes(pickle.dumps(message))


def _result_message(result: object) -> bytes:
    # Plain pickle, not Connection.send: that one shares tensors through file descriptors of a process that ends.
    try:
        return pickle.dumps(("returned", pickle.dumps(result)))
    except Exception as error:
        raise TypeError(
            f"the result, of type {type(result).__name__}, cannot be sent back: {error}; "
            "return plain values and tensors"
        ) from error


def _portable(error: BaseException) -> bytes | None:
    """Return the pickled exception; None if it cannot be pickled."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - whatever its class raises: the caller then chains nothing
        return None
    return data


def _format(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, _without_our_frames(error.__traceback__)))


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    theirs = trace
    while theirs is not None and theirs.tb_frame.f_code.co_filename == __file__:
        theirs = theirs.tb_next
    return theirs or trace


def _wait_for_release(connection: Connection) -> None:
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        return


def _leave_with_the_caller() -> None:
    """End this process and its children when the caller is gone, even during a collective."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel
    if sys.platform == "linux":  # SIGIO ends the group, also while C code holds the interpreter's lock
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        wait([sentinel])
        with contextlib.suppress(ProcessLookupError):  # by number: a starting rank is not in its own group yet
            os.killpg(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="caller-watch", daemon=True).start()


# -- in the server ------------------------------------------------------------------------------------------------


def _import_modules(names: Iterable[str]) -> str | None:
    """Import modules until one initializes CUDA, and return its name; skip missing ones."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return name
    return None


_initializes_cuda: str | None = None  # the module that did so in the server

if SERVER_MODULES in os.environ:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch.cuda.is_available() does not start the driver then
    gc.disable()  # looking for garbage takes a quarter of the time of these imports
    _initializes_cuda = _import_modules(os.environ.pop(SERVER_MODULES).split(","))
    gc.freeze()  # a rank that looked for garbage in them would copy all pages that it shares with the server
    gc.enable()
