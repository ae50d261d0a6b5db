"""Run a function on several real processes that form one ``torch.distributed`` group.

`run_ranks` serves the tests, the test kit for plugins, and `verify` on an abstract mesh. Processes are forked from a
server that has imported torch once, so that a run costs about a second. They connect through a file in a private
directory: there is no port to race for.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import pickletools
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

from slapo_core.errors import LaunchError, RankFailedError
from slapo_runtime.rank_process import (
    SERVER_MODULES,
    Job,
    ServerWithCudaError,
    describe,
    origin,
    run_rank,
    trace_file,
)

T = TypeVar("T")

_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed._functional_collectives",
    "torch.utils.checkpoint",
    "torch._dynamo",  # by every optimizer
    "slapo_runtime.build",
    "slapo_core.schedule.creation",
]
_LEFT_TO_RANKS: set[str] = set()
_GRACE = 2.0  # seconds that the other ranks get to report their own failure after the first one
_LAST_WORDS = 5.0  # seconds for writing a traceback, or for leaving the group, before a rank is killed


def preload_modules(*names: str) -> None:
    """Import further modules once, in the server of the processes.

    Call it before the first `run_ranks` of this process, which starts the server.

    Args:
        names: dotted module names, e.g. ``"transformers.models.bert.modeling_bert"``; missing modules are skipped.
    """
    _PRELOAD.extend(name for name in names if name not in _PRELOAD)


def never_preload(*names: str) -> None:
    """Leave modules out of the server of the processes: every rank imports them itself.

    For a module that initializes CUDA when it is imported. Call it before the first `run_ranks` of this process.

    Args:
        names: dotted module names.
    """
    _LEFT_TO_RANKS.update(names)


def run_ranks(
    function: Callable[..., T],
    *args: Any,
    world_size: int,
    timeout: float = 120.0,
    backend: str = "gloo",
    environment: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[T]:
    """Call ``function(*args, **kwargs)`` on ``world_size`` processes, and return all results.

    Each process leads an operating-system process group, which ends with the run. Ranks have torch's default process
    group, one thread, the caller's environment and working directory, and RANK, LOCAL_RANK and WORLD_SIZE. Tensors, in
    arguments and results, are sent by value.

    Args:
        function: defined at the top level of a module (not a lambda or an inner function).
        args: positional arguments; anything that pickle can send.
        world_size: the number of processes, at least 1.
        timeout: seconds for the entire run; then the running ranks are ended.
        backend: of ``torch.distributed.init_process_group``. With one for GPUs (``"nccl"``, ``"cpu:gloo,cuda:gloo"``)
            GPU ``rank % number of GPUs`` is a rank's current device; over NCCL ranks cannot share a GPU.
        environment: variables to set besides the caller's.
        kwargs: keyword arguments of ``function``.

    Returns:
        The results in the order of the ranks.

    Raises:
        LaunchError: the function or an argument cannot be sent, a number is invalid, there are fewer GPUs than ranks of
            NCCL, a preloaded module initializes CUDA, or the ranks cannot import the script: it calls `run_ranks`
            outside of ``if __name__ == "__main__":``, or came from standard input.
        RankFailedError: a rank raised or died (ranks that then wait in a collective are ended after two seconds), or
            the timeout passed (``first`` is None then); with every rank's traceback.
    """
    if world_size < 1:
        raise LaunchError(f"world_size must be at least 1 (got {world_size})")
    if timeout <= 0:
        raise LaunchError(f"timeout must be a positive number of seconds (got {timeout})")
    if is_importing_script():
        raise LaunchError("run_ranks was called while a rank was still importing the main script", hint=MAIN_HINT)
    if "forkserver" not in multiprocessing.get_all_start_methods():
        raise LaunchError(f"ranks are started by forkserver, which this platform ({sys.platform}) does not have")

    _require_own_gpus(backend, world_size)
    require_importable_script()
    payload = _pickle_call(function, args, kwargs)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run_rank.__module__])
    with tempfile.TemporaryDirectory(prefix="slapo-ranks-", ignore_cleanup_errors=True) as directory:
        job = Job(
            payload=payload,
            origin=origin(function),
            world_size=world_size,
            backend=backend,
            timeout=timeout,
            directory=directory,
            environment={**os.environ, **(environment or {})},
        )
        run = _Run(name=describe(function), world_size=world_size, timeout=timeout, directory=Path(directory))
        try:
            run.start(context, job)
            run.collect()
        finally:
            run.close()
    return run.results()


def run_process(
    function: Callable[..., T],
    *args: Any,
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> T:
    """Call ``function(*args, **kwargs)`` in a fresh process, without a process group; as :func:`run_ranks` otherwise.

    Args:
        function: defined at the top level of a module.
        args: positional arguments; anything that pickle can send.
        timeout: seconds for the entire run.
        environment: variables to set besides the caller's.
        kwargs: keyword arguments of ``function``.
    """
    return run_ranks(function, *args, world_size=1, timeout=timeout, backend="", environment=environment, **kwargs)[0]


def _require_own_gpus(backend: str, world_size: int) -> None:
    """Require one GPU for each rank of NCCL.

    Raises:
        LaunchError: ranks would share a GPU.
    """
    if "nccl" not in backend:
        return
    import torch

    count = torch.cuda.device_count()
    if world_size > count:
        raise LaunchError(
            f"NCCL needs a GPU for each rank ({world_size} ranks, GPUs of this machine: {count})",
            hint='backend="cpu:gloo,cuda:gloo", over which ranks share GPUs' if count else 'backend="gloo"',
        )


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    if not callable(function):
        raise LaunchError(f"the first argument of run_ranks must be a function (got {type(function).__name__})")
    if getattr(function, "__module__", None) == "__main__" and _is_typed_in():
        raise _typed_in(describe(function))
    try:
        pickle.dumps(function)
    except Exception as error:  # pickle raises several kinds, and whatever __reduce__ raises
        raise LaunchError(
            f"cannot send {describe(function)} to the ranks: it must be defined at the top level of a module ({error})",
            hint="move it out of its function or class, and pass the variables that it uses as arguments",
        ) from error
    try:
        payload = pickle.dumps((function, args, dict(kwargs)))
    except Exception as error:
        raise LaunchError(
            f"cannot send the arguments of {describe(function)} to the ranks: {error}",
            hint="pass plain values, tensors and module-level functions, and make other objects inside the function",
        ) from error
    if _is_typed_in():
        words = [word for _, word, _ in pickletools.genops(payload) if isinstance(word, str)]
        found = next((name for module, name in itertools.pairwise(words) if module == "__main__"), None)
        if found is not None:
            raise _typed_in(f"'{found}'")
    return payload


def _is_typed_in() -> bool:
    """Return whether ``__main__`` is a notebook, an interactive session or ``python -c``."""
    return getattr(sys.modules["__main__"], "__file__", None) is None


def _typed_in(name: str) -> LaunchError:
    return LaunchError(
        f"cannot send {name} to the ranks: it was typed into an interactive session",
        hint="put it into a module file and import it",
    )


class ServerEndedError(LaunchError):
    """The server of the ranks ended; the next call starts another one."""


def _server() -> int:
    return int(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]


@dataclass
class _Run:
    """The ranks of one call: their processes and reports."""

    name: str
    world_size: int
    timeout: float
    directory: Path
    processes: list[ForkServerProcess] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    returned: dict[int, bytes] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    causes: dict[int, BaseException] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    called: set[int] = field(default_factory=set)
    unprepared: bool = False
    server: int = 0
    first: int | None = None

    def start(self, context: ForkServerContext, job: Job) -> None:
        self.deadline = time.monotonic() + self.timeout
        os.environ[SERVER_MODULES] = ",".join(name for name in _PRELOAD if name not in _LEFT_TO_RANKS)
        try:
            forkserver.ensure_running()
        finally:
            os.environ.pop(SERVER_MODULES, None)  # another thread may have removed it
        self.server = _server()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_rank, args=(rank, theirs, job), name=f"rank {rank}")
            try:
                process.start()
            except (EOFError, ConnectionError) as error:  # it, or the server, ended before reading the arguments
                ours.close()
                raise self._not_started() from error
            finally:
                theirs.close()  # so that the end of the process closes the connection
            self.connections.append(ours)
            self.processes.append(process)

    def collect(self) -> None:
        """Wait for all reports, the grace period after a failure, or the timeout."""
        while pending := self._pending():
            ready = wait(
                [self.connections[rank] for rank in pending], timeout=max(0.0, self.deadline - time.monotonic())
            )
            if not ready:
                self._end(pending)
                return
            for rank in pending:
                if self.connections[rank] in ready:
                    self._receive(rank)

    def close(self) -> None:
        """End every rank and its child processes."""
        for rank in self._pending():
            if rank < len(self.processes):  # not if the caller was interrupted before its start
                self.processes[rank].kill()
        for connection in self.connections:
            connection.close()
        patience = time.monotonic() + _LAST_WORDS
        for process in self.processes:
            process.join(max(0.0, patience - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the rank's group ended
                assert process.pid is not None
                os.killpg(process.pid, signal.SIGKILL)
            process.close()

    def results(self) -> list[Any]:
        """Return every rank's result, or raise the error about all ranks."""
        if self.unprepared:
            raise self._not_started()
        if self.failures or self.ended:
            cause = self.causes[min(self.causes)] if self.causes else None
            if isinstance(cause, ServerWithCudaError):
                raise cause
            raise self._error() from cause
        try:
            return [pickle.loads(self.returned[rank]) for rank in range(self.world_size)]
        except Exception as error:
            raise LaunchError(f"a result of {self.name} cannot be read back: {error}") from error

    def _not_started(self) -> LaunchError:
        time.sleep(0.1)  # a killed process closes its files before it has ended
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if _server() != self.server or os.waitid(os.P_PID, self.server, flags) is not None:
            return ServerEndedError("the server of the rank processes ended while a rank was started")
        return import_error()

    def _pending(self) -> list[int]:
        reported = self.returned.keys() | self.failures.keys()
        return [rank for rank in range(self.world_size) if rank not in reported]

    def _receive(self, rank: int) -> None:
        try:
            kind, *content = pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._fail(rank, self._death(rank))
            return
        if kind == "called":
            self.called.add(rank)
        elif kind == "returned":
            self.returned[rank] = content[0]
        else:
            text, cause = content
            if cause is not None:
                with contextlib.suppress(Exception):  # a class that only the rank can import; `text` has its text
                    self.causes[rank] = pickle.loads(cause)
            self._fail(rank, text)

    def _fail(self, rank: int, text: str) -> None:
        self.failures[rank] = text
        if self.first is None:
            self.first = rank
            self.deadline = min(self.deadline, time.monotonic() + _GRACE)

    def _death(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(_LAST_WORDS)
        code = process.exitcode
        if code is not None:
            self.codes[rank] = code
        how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        when = "without returning or raising" if rank in self.called else "before the function was called"
        if code is not None and code > 0 and not trace_file(self.directory, rank).exists():
            self.unprepared = True
        return f"The process ended {how}, {when}\n{self._trace(rank)}"

    def _end(self, pending: list[int]) -> None:
        """End ranks without a report, with a traceback of each."""
        for rank in pending:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                pid = self.processes[rank].pid
                assert pid is not None
                os.kill(pid, signal.SIGUSR1)  # writes the traceback, then ends the process
        patience = time.monotonic() + _LAST_WORDS
        for rank in pending:
            self.processes[rank].join(max(0.0, patience - time.monotonic()))
            if self.processes[rank].exitcode is None:
                self.processes[rank].kill()
            where = "before the function was called" if rank not in self.called else "no traceback is available"
            self.ended[rank] = self._trace(rank) or where + "\n"

    def _trace(self, rank: int) -> str:
        path = trace_file(self.directory, rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def _error(self) -> RankFailedError:
        if self.first is None:
            ranks = ", ".join(map(str, self.ended))
            headline = f"{self.name} did not end within {self.timeout:g} s on rank {ranks} of {self.world_size}"
        else:
            ranks = ", ".join(map(str, sorted(self.failures)))
            headline = f"{self.name} failed on rank {ranks} of {self.world_size}, first on rank {self.first}"
        sections = [headline]
        for rank in range(self.world_size):
            if rank in self.failures:
                sections.append(f"---- rank {rank} failed ----\n{self.failures[rank].rstrip()}")
            elif rank in self.ended:
                why = "after the timeout" if self.first is None else "because others had failed"
                sections.append(f"---- rank {rank} was ended {why}, at ----\n{self.ended[rank].rstrip()}")
            else:
                sections.append(f"---- rank {rank} returned ----")
        return RankFailedError(
            "\n".join(sections),
            failures=self.failures,
            ended=self.ended,
            first=self.first,
            causes=self.causes,
            codes=self.codes,
        )


MAIN_HINT = "put the call under `if __name__ == '__main__':`, because every rank imports the script"


def is_importing_script() -> bool:
    """Return whether this process is a rank still importing the script."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def require_importable_script() -> None:
    """Refuse a script from standard input, with the ``__file__`` ``<stdin>``, which no rank can import.

    Raises:
        LaunchError: there is no such file.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is not None and getattr(main, "__spec__", None) is None and not os.path.exists(file):
        raise LaunchError(
            f"every rank imports the script, and there is no file {os.path.basename(file)!r}",
            hint="save the script as a file, e.g. train.py, with the call under `if __name__ == '__main__':`, "
            "and run `python train.py`",
        )


def import_error() -> LaunchError:
    """Make the error for a rank that ended before it read its function."""
    script = getattr(sys.modules["__main__"], "__file__", None) or "of this process"
    return LaunchError(
        f"a rank ended while it imported the script {script}, as every rank does before the function is called",
        hint=MAIN_HINT,
    )
