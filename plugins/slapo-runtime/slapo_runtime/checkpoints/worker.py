"""Write staged checkpoints in a process of its own, while training goes on.

The process is started without the user's script; it gets tensors by an anonymous file in memory, and ends with the
process that started it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slapo_core.errors import BuildError
from slapo_runtime.checkpoints.writer import Completion, RankFile

_ALIGNED = 64  # bytes
_SECONDS = 30.0  # the wait for the files of other ranks, once the training process is at its end


class StagedTensor(NamedTuple):
    """A rectangle in the shared memory."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    dtype: torch.dtype
    at: int


@dataclass
class Staged:
    """The part of a checkpoint that one rank writes, with its values in the shared memory.

    Args:
        directory: of the step.
        rank: the place among the ranks that write.
        identifier: of the save.
        completion: for the first rank's worker, which completes the checkpoint.
        tensors: the rectangles.
        size: of all of them, in bytes.
    """

    directory: Path
    rank: int
    identifier: str
    completion: Completion | None
    tensors: list[StagedTensor] = field(default_factory=list)
    size: int = 0

    def write(self, memory: mmap.mmap | None, check: Any) -> None:
        """Write the rank's file."""
        with RankFile(self.directory, self.rank, self.identifier) as file:
            for one in self.tensors:
                check()
                count = 1
                for length in one.extent:
                    count *= length
                value = torch.empty(one.extent, dtype=one.dtype)
                if count and memory is not None:
                    value = torch.frombuffer(memory, dtype=one.dtype, count=count, offset=one.at).view(one.extent)
                file.add(one.name, one.shape, one.offset, value)
            check()
            file.finish()


class Worker:
    """The worker process of this rank, and the memory that it shares.

    The memory is kept for the next save.
    """

    def __init__(self) -> None:
        self._memory = _anonymous_file()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._results: dict[str, str | None] = {}
        self._expected: set[str] = set()
        self._identifier = ""
        weakref.finalize(self, os.close, self._memory)

    def stage(
        self, staged: Staged, name: str, shape: tuple[int, ...], offset: tuple[int, ...], value: torch.Tensor
    ) -> None:
        """Copy a rectangle into the shared memory."""
        own = value.detach().to("cpu").contiguous()
        at = -(-staged.size // _ALIGNED) * _ALIGNED
        if own.numel():
            content: Any = own.reshape(-1).view(torch.uint8).numpy()
            view = memoryview(content)
            done = 0
            while done < len(view):
                done += os.pwrite(self._memory, view[done:], at + done)
        staged.tensors.append(StagedTensor(name, shape, offset, tuple(own.shape), own.dtype, at))
        staged.size = at + own.nbytes

    def start(self, staged: Staged) -> None:
        """Let the process write, which is started if there is none."""
        if self._process is None or self._process.poll() is not None:
            self._connection, theirs = Pipe()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(self._memory)],
                pass_fds=(theirs.fileno(), self._memory),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C ends the training, and not a file that is half written
                env={
                    **os.environ,
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": _search_path(),
                    "PYTHONSAFEPATH": "1",
                },
            )
            theirs.close()
            weakref.finalize(self, _finish, os.getpid(), self._process, self._connection)
        assert self._connection is not None
        self._results.clear()
        self._identifier = staged.identifier
        self._expected = {"written", "completed"} if staged.completion is not None else {"written"}
        self._connection.send(staged)

    @property
    def is_idle(self) -> bool:
        """Whether everything that was started is over."""
        while self._connection is not None and not self._is_over and self._connection.poll():
            self._receive()
        return self._is_over

    @property
    def _is_over(self) -> bool:
        failed = any(error is not None for error in self._results.values())
        return failed or self._expected <= self._results.keys()

    def result(self, what: str) -> None:
        """Wait for a part of the work.

        Args:
            what: ``"written"`` or ``"completed"``.

        Raises:
            BuildError: it failed.
        """
        while what not in self._results:
            self._receive()
        error = self._results[what]
        if error is not None:
            raise BuildError(error, hint="engine.save(directory) again; earlier checkpoints are intact")

    def _receive(self) -> None:
        assert self._connection is not None
        assert self._process is not None
        try:
            identifier, what, error = self._connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            for missing in self._expected - self._results.keys():
                self._results[missing] = f"the worker process that writes checkpoints ended with exit code {code}"
            return
        if identifier == self._identifier:  # not of an abandoned save
            self._results[what] = error

    def abandon(self) -> None:
        """Let the process give up waiting for the files of other ranks."""
        if self._connection is not None and not self._is_over:
            with contextlib.suppress(OSError):  # it ended
                self._connection.send(None)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("slapo checkpoint", 0)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _search_path() -> str:
    return os.pathsep.join(path for path in sys.path if path)


def _finish(owner: int, process: subprocess.Popen[bytes], connection: Connection[Any, Any]) -> None:
    """Wait for the process's work at the end of the interpreter, and warn of errors that no wait() raised."""
    if os.getpid() != owner:  # a fork, e.g. of a DataLoader
        return
    with contextlib.suppress(OSError):
        connection.send("end")
    process.wait()
    with contextlib.suppress(EOFError, OSError):
        while connection.poll():
            _, _, error = connection.recv()
            if error is not None:
                warnings.warn(f"an asynchronous save is not complete: {error}", stacklevel=2)
    connection.close()


# -- in the process ---------------------------------------------------------------------------------------------

_MAIN = """
import sys
from slapo_runtime.checkpoints.worker import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""


def main(connection: int, memory: int) -> None:
    """Write what the training process stages, until it ends.

    Args:
        connection: the descriptor of the pipe.
        memory: the descriptor of the shared memory.
    """
    with Connection(connection) as pipe:
        _Served(pipe, memory, os.getppid()).run()


class _Ended(BaseException):
    """The training process ended."""


class _Served:
    """The work of the process.

    Args:
        pipe: to the training process.
        memory: the descriptor of the shared memory.
        parent: the training process.
    """

    def __init__(self, pipe: Connection[Any, Any], memory: int, parent: int) -> None:
        self._pipe, self._memory, self._parent = pipe, memory, parent
        self._until: float | None = None  # the end of the wait for other ranks

    def run(self) -> None:
        with contextlib.suppress(_Ended, EOFError, OSError):
            while self._until is None and (staged := self._next()) != "end":
                if isinstance(staged, Staged):
                    self._serve(staged)

    def _next(self) -> Any:
        while not self._pipe.poll(1.0):
            self._check()
        return self._pipe.recv()

    def _serve(self, staged: Staged) -> None:
        self._pipe.send((staged.identifier, "written", self._outcome(lambda: self._write(staged))))
        completion = staged.completion
        if completion is not None:
            outcome = self._outcome(lambda: completion.run(ends=self._gives_up))
            self._pipe.send((staged.identifier, "completed", outcome))

    @staticmethod
    def _outcome(work: Any) -> str | None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - reported to the training process
            return f"{type(error).__name__}: {getattr(error, 'message', error)}"
        return None

    def _write(self, staged: Staged) -> None:
        with contextlib.ExitStack() as stack:
            memory = None
            if staged.size:
                memory = mmap.mmap(self._memory, staged.size)
                stack.callback(_close, memory)
            staged.write(memory, self._check)

    def _check(self) -> None:
        """End with the training process: its checkpoint stays incomplete."""
        if os.getppid() != self._parent:
            raise _Ended

    def _gives_up(self) -> bool:
        self._check()
        if self._pipe.poll():
            if self._pipe.recv() is None:
                return True
            self._until = time.monotonic() + _SECONDS
        return self._until is not None and time.monotonic() > self._until


def _close(memory: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # a tensor of an error's traceback still refers to it
        memory.close()
