"""The guard: starts the processes of trials, ends them, and ends with the search.

It is small and imports no torch, so that it is the last that the kernel would choose where memory runs out. All
processes of a trial are below it, and those whose parent has ended become its own: when a trial is over, nothing of it
is left. It reads jobs from its standard input, and when that is closed, because the search has ended in whatever way,
it ends everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from slapo_tune.trials import job as files
from slapo_tune.trials.outputs import Output
from slapo_tune.trials.processes import adopt_orphans, end_all, kills_for_memory

__all__ = ["main"]

_GRACE = 3.0  # seconds that the other ranks get to say what they saw, after the first one has failed
_LAST_WORDS = 0.5  # seconds for writing where a rank stands
_STARTING = 300.0  # seconds for importing torch, which are not the trial's
_TICK = 0.05
_IDLE = 1.0
_AT_ONCE = 64


@dataclass
class _Ranks:
    """What is known of the ranks of a job."""

    began: float = field(default_factory=time.monotonic)
    pids: list[int] = field(default_factory=list)
    codes: dict[int, tuple[int, float]] = field(default_factory=dict)
    stopped: tuple[int, ...] = ()
    failed: bool = False
    timed_out: bool = False
    lost: str = ""


class Guard:
    """Runs one job at a time.

    Args:
        preload: modules that the processes that ranks are forked from imports once.
    """

    def __init__(self, preload: list[str]) -> None:
        self._preload = preload
        self._nursery: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._unread = b""
        self._asked = b""
        self._search = os.getppid()

    def serve(self) -> None:
        """Run jobs until there is nobody to run them for."""
        self._start_nursery()
        tell({"ready": os.getpid()})
        while True:
            tell({"ended": self._run(self._next_job())})

    def close(self) -> None:
        end_all(())

    def _next_job(self) -> dict[str, Any]:
        while b"\n" not in self._asked:
            self._listen([0])
        line, _, self._asked = self._asked.partition(b"\n")
        return dict(json.loads(line))

    def _run(self, job: dict[str, Any]) -> dict[str, Any]:
        directory = job["directory"]
        os.mkfifo(files.output(directory))
        pipe = os.open(files.output(directory), os.O_RDWR | os.O_NONBLOCK)  # without any writer it would be at its end
        files.write(files.Path(directory, "job.json"), job)
        kills = kills_for_memory()
        try:
            with Output(job["output"]) as output:
                if self._nursery is None or self._nursery.poll() is not None:
                    self._start_nursery()
                self._order({"directory": directory, "ranks": job["ranks"]})
                ranks = self._watched(job, pipe, output)
                assert self._nursery is not None
                strays, stuck = end_all({self._nursery.pid})
                if ranks.lost:
                    self._forget_nursery()
                else:
                    self._settle(ranks.stopped)
                _drain(pipe, output)
        finally:
            os.close(pipe)
        return {
            "codes": ranks.codes,
            "stopped": ranks.stopped,
            "timed_out": ranks.timed_out,
            "killed_for_memory": kills_for_memory() > kills,
            "strays": [] if ranks.stopped or ranks.lost else strays,
            "stuck": stuck,
            "seconds": time.monotonic() - ranks.began,
            "lost": ranks.lost,
        }

    def _watched(self, job: dict[str, Any], pipe: int, output: Output) -> _Ranks:
        """Watch the ranks of a job until all have ended, or some have to be."""
        ranks = _Ranks()
        deadline = ranks.began + _STARTING
        while len(ranks.codes) < job["ranks"] and not ranks.lost:
            self._wait(pipe)
            _drain(pipe, output)
            for message in self._messages():
                if message is None:
                    assert self._nursery is not None
                    ranks.lost = f"the process that ranks are forked from {how(self._nursery.wait())}"
                elif "pids" in message:
                    ranks.pids, ranks.began = message["pids"], time.monotonic()
                    deadline = ranks.began + job["timeout"]
                else:
                    rank, code = message["rank"], message["code"]
                    ranks.codes[rank] = (code, time.monotonic())
                    if code != 0 or files.read(files.result(job["directory"], rank)) is None:
                        deadline = min(deadline, time.monotonic() + _GRACE)
                        ranks.failed = True
            if time.monotonic() > deadline:
                ranks.stopped = tuple(rank for rank in range(job["ranks"]) if rank not in ranks.codes)
                ranks.timed_out = not ranks.failed
                self._ask_where([ranks.pids[rank] for rank in ranks.stopped if rank < len(ranks.pids)])
                break
        return ranks

    def _wait(self, pipe: int) -> None:
        """Until something happens, or a moment has passed."""
        assert self._line is not None
        self._listen([0, self._line.fileno(), pipe])

    def _listen(self, descriptors: list[int]) -> None:
        """Wait for any of these, and read what is asked; ends everything when the search has ended."""
        ready = select.select(descriptors, [], [], _TICK if len(descriptors) > 1 else _IDLE)[0]
        data = os.read(0, 1 << 16) if 0 in ready else None
        if data == b"" or os.getppid() != self._search:  # or a process that the search forked holds the pipe open
            raise SystemExit(0)
        self._asked += data or b""

    def _ask_where(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        if pids:
            time.sleep(_LAST_WORDS)

    def _start_nursery(self) -> None:
        self._forget_nursery()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "slapo_tune.trials.nursery", str(theirs.fileno()), str(os.getpid())]
        self._nursery = subprocess.Popen(
            [*command, *self._preload], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        ours.setblocking(False)
        self._line, self._unread = ours, b""

    def _forget_nursery(self) -> None:
        if self._nursery is not None:
            self._nursery.kill()
            self._nursery.wait()
            self._nursery = None
        if self._line is not None:
            self._line.close()
            self._line = None

    def _order(self, message: dict[str, Any]) -> None:
        assert self._line is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it ended: its line says so
            self._line.sendall(json.dumps(message).encode() + b"\n")

    def _messages(self) -> list[dict[str, Any] | None]:
        """What the nursery has said; None when it has ended."""
        assert self._line is not None
        ended = False
        while True:
            try:
                data = self._line.recv(1 << 16)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                ended = True
                break
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        messages: list[dict[str, Any] | None] = [json.loads(line) for line in lines]
        return [*messages, None] if ended else messages

    def _settle(self, stopped: tuple[int, ...]) -> None:
        """Until the nursery has seen the end of the ranks that were killed, so that it is ready for others."""
        waited_for = set(stopped)
        patience = time.monotonic() + 5.0
        while waited_for and time.monotonic() < patience:
            for message in self._messages():
                if message is None:
                    return
                waited_for.discard(message.get("rank", -1))
            time.sleep(0.005)
        if waited_for:
            self._forget_nursery()


def _drain(pipe: int, output: Output) -> None:
    with contextlib.suppress(BlockingIOError):
        for _ in range(_AT_ONCE):  # who prints without end must not keep us from looking at the clock
            output.write(os.read(pipe, 1 << 16))


def how(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def tell(message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


def main() -> None:
    """``python -m slapo_tune.trials.guard DIRECTORY MODULE...``: what is in DIRECTORY is removed in the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    adopt_orphans()
    guard = Guard(sys.argv[2:])
    try:
        with contextlib.suppress(BrokenPipeError):
            guard.serve()
    finally:
        guard.close()
        shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
