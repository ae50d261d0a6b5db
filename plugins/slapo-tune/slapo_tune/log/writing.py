"""`LogFile`: the log of a search that runs, held by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from slapo_core.spec.sampler import Point, Trial
from slapo_tune.errors import LogError
from slapo_tune.log.format import FORMAT, as_line, from_line, trial_line
from slapo_tune.log.reading import parse

__all__ = ["LogFile"]


class LogFile:
    """A log that this process alone writes; a context manager.

    Every line is on disk before its method returns, and no line is ever changed: a process that is killed leaves at
    most half a line at the end, which the next one takes away. The kernel lets go of the file when its process ends,
    however that ends.

    Args:
        path: of the log; it is made if it is not there.
        header: what the log is of.

    Attributes:
        log: what the log said when it was opened.
        repaired: what was taken away at its end, in words; empty where the last process was not killed in the middle
            of a line.

    Raises:
        LogError: it cannot be written, is no log, is of another study, is damaged, or another process writes it.
            Nothing was changed.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
        self._path = Path(path)
        header = from_line(as_line(header))  # as it is read back
        self.repaired = ""
        is_new = not self._path.exists()
        self._file = _opened(self._path)
        try:
            self._lock()
            self.log = parse(self._path.read_bytes(), self._path)
            if self.log.header:
                _compare(self.log.header, header, self._path)
            self._repair()
            if not self.log.header:
                self._append({"slapo_tune_log": FORMAT, **header})
            if is_new:
                _settle_directory(self._path.parent)
            self._append({"event": "opened", "pid": os.getpid(), "host": socket.gethostname(), "at": time.time()})
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> LogFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def started(self, number: int, point: Point) -> None:
        """A trial is about to run; if nothing else is told of it, it runs again."""
        self._append({"event": "started", "number": number, "point": dict(point), "at": time.time()})

    def ended(self, trial: Trial) -> None:
        """A trial has ended, or was pruned."""
        self._append(trial_line(trial))

    def verified(self, number: int, *, right: bool | None, reason: str = "") -> None:
        """What the verification of a trial said, None where it could not; one that it refused is ``"wrong"`` now."""
        self._append({"event": "verified", "number": number, "right": right, "reason": reason, "at": time.time()})

    def _append(self, record: Mapping[str, Any]) -> None:
        data = as_line(record)
        self._require_file()
        begin = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):  # what could be written of the line is no line
                os.ftruncate(self._file, begin)
            raise LogError(f"the log {self._path} cannot be written: {error.strerror}") from error

    def _require_file(self) -> None:
        """
        Raises:
            LogError: what is written would be in no file.
        """
        try:
            is_there = os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except OSError:
            is_there = False
        if not is_there:
            raise LogError(f"the log {self._path} was removed or replaced while the search ran; no more is written")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            opened = parse(self._path.read_bytes(), self._path).opened
            holder = f"process {opened[-1]['pid']} on {opened[-1]['host']}" if opened else "another process"
            raise LogError(
                f"{holder} writes the log {self._path}; two searches on one log would try points twice",
                hint="wait for it, end it, or give another log=",
            ) from None
        except OSError as error:
            raise LogError(
                f"the log {self._path} cannot be locked ({error.strerror}), so that two searches could write it",
                hint="put the log on a local disk: log=",
            ) from error

    def _repair(self) -> None:
        if not self.log.torn:
            return
        if self.log.is_unended:
            os.write(self._file, b"\n")
            self.repaired = f"the last line of {self._path} had no end; it has one now, and says all that it should"
        else:
            os.ftruncate(self._file, self.log.whole)
            self.repaired = (
                f"{len(self.log.torn)} bytes at the end of {self._path} were half a line, and are taken away: a "
                "process was killed while it wrote them"
            )
        os.fsync(self._file)


def _opened(path: Path) -> int:
    """
    Raises:
        LogError: not a file that can be read and written.
    """
    if path.is_dir():
        raise LogError(f"the log {path} is a directory", hint=f'log="{path / "run.jsonl"}"')
    if path.exists() and not path.is_file():
        raise LogError(f"the log {path} is no ordinary file", hint='log="run.jsonl"')
    try:
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except FileNotFoundError as error:
        raise LogError(
            f"the log {path} cannot be written: there is no directory {path.parent}", hint=f"mkdir -p {path.parent}"
        ) from error
    except OSError as error:
        raise LogError(
            f"the log {path} cannot be written: {error.strerror}", hint="give a log= in a directory of yours"
        ) from error


def _settle_directory(directory: Path) -> None:
    """Make the name of a new file as lasting as its contents."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # a file system that does not know it for directories
        pass
    finally:
        os.close(descriptor)


_TOLD_ONLY = ("versions", "started", "described", "sources", "timeout")
"""What a header tells its readers, and what may differ when a search goes on."""


def _compare(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """
    Raises:
        LogError: they are of different studies; it names the first difference.
    """
    old = {key: value for key, value in old.items() if key != "slapo_tune_log"}
    for key in dict.fromkeys([*new, *old]):
        was, is_now = old.get(key), new.get(key)
        if key in _TOLD_ONLY or was == is_now:
            continue
        what = f"its {key} is {was!r}, and this study's is {is_now!r}"
        if key in ("fingerprint", "symbols", "space"):
            was, is_now = old.get("described"), new.get("described")
            what = f"its space is another one\n  {_difference(str(was), str(is_now))}"
        raise LogError(
            f"{path} is the log of another study: {what}; nothing was written",
            hint=f'log="{path.with_name(path.stem + "-2" + path.suffix)}" begins a new one',
        )


def _difference(old: str, new: str) -> str:
    """The first line in which two descriptions differ."""
    olds, news = old.splitlines(), new.splitlines()
    for was, is_now in zip(olds, news, strict=False):
        if was != is_now:
            return f"there: {was.strip()}\n  here:  {is_now.strip()}"
    more = olds[len(news) :] or news[len(olds) :]
    where = "there" if len(olds) > len(news) else "here"
    return f"only {where}: {more[0].strip()}" if more else "in what its function does, not in what it shows"
