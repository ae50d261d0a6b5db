"""The log of a search: one line a trial, on disk before the next one starts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from slapo_tune.errors import LogError
from slapo_tune.samplers import STATUSES, Point, Trial

FORMAT = 1
"""The version of the format; a header says ``{"slapo_tune_log": FORMAT, ...}``."""

_HEADER = '{"slapo_tune_log":'


def as_line(record: Mapping[str, Any]) -> bytes:
    """Encode a line, with its end. JSON has no NaN and no infinity: they are written as ``{"float": "nan"}``."""
    return json.dumps(_safe(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def is_start_of_header(data: bytes) -> bool:
    """Return whether these bytes are the beginning of a header, or its whole."""
    header = _HEADER.encode()
    return data[: len(header)] == header[: len(data)]


def from_line(line: bytes) -> dict[str, Any]:
    """Decode a line.

    Raises:
        ValueError: it is not one JSON object.
    """
    record = _restored(json.loads(line.decode()))
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def trial_line(trial: Trial) -> dict[str, Any]:
    """Return the record of a trial that has ended, or was pruned."""
    return {
        "event": "ended",
        "number": trial.number,
        "point": dict(trial.point),
        "status": trial.status,
        "value": trial.value,
        "reason": trial.reason,
        "predicted": dict(trial.predicted),
        "measured": dict(trial.measured),
        "seconds": trial.seconds,
    }


def trial_from(record: Mapping[str, Any]) -> Trial:
    """Return the trial of a record.

    Raises:
        ValueError: a field is missing, or has a wrong type.
    """
    for name, kind in (("number", int), ("point", dict), ("reason", str), ("predicted", dict), ("measured", dict)):
        if not isinstance(record.get(name), kind) or isinstance(record[name], bool):
            raise ValueError(f"'{name}' is {record.get(name)!r}")
    if record.get("status") not in STATUSES:
        raise ValueError(f"'status' is {record.get('status')!r}")
    value = record.get("value")
    if (value is None) == (record["status"] == "ok") or not isinstance(value, (int, float, type(None))):
        raise ValueError(f"'value' is {value!r} and 'status' is {record['status']!r}")
    return Trial(
        number=record["number"],
        point=_tupled(record["point"]),
        status=record["status"],
        value=value,
        reason=record["reason"],
        predicted=record["predicted"],
        measured=record["measured"],
        seconds=float(record.get("seconds", 0.0)),
    )


def _safe(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, Mapping):
        return {str(key): _safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_safe(item) for item in value]
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"float"} and isinstance(value["float"], str):
            return float(value["float"])
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value


def _tupled(value: Any) -> Any:
    """Choices are plain data without lists, so a list was a tuple."""
    if isinstance(value, dict):
        return {key: _tupled(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tupled(item) for item in value)
    return value


@dataclass(frozen=True)
class Log:
    """The contents of a log.

    Args:
        header: the study's; empty where nothing has been written yet.
        trials: those that have ended, in order; one that the verification refused is ``"wrong"``.
        running: number and point of the trial that was started and has not ended; None if there is none.
        verified: the number of the trial that was verified last and found right; None if there is none.
        opened: process, host and time of each ``tune`` that wrote.
        torn: bytes of an incomplete line at the end: a process was killed while writing it.
        whole: how many bytes are whole lines.
        is_unended: whether the torn bytes are a whole line but for its end.
    """

    header: Mapping[str, Any] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    running: tuple[int, Mapping[str, Any]] | None = None
    verified: int | None = None
    opened: tuple[Mapping[str, Any], ...] = ()
    torn: bytes = b""
    whole: int = 0
    is_unended: bool = False


def read_log(path: str | os.PathLike[str]) -> Log:
    """Read a log, also while it is being written: a last line that is not whole is left out.

    Args:
        path: of the log.

    Raises:
        LogError: there is none, it cannot be read, it is not a slapo-tune log, or a line of it is damaged.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LogError(f"the log {path} cannot be read: {error.strerror}") from error
    log = parse(data, path)
    if not log.header:
        raise LogError(f"{path} is not a log yet: nothing has been written")
    return log


def parse(data: bytes, path: Path) -> Log:
    """Parse the bytes of a log.

    Raises:
        LogError: they are of something else, or a line but the last is damaged.
    """
    end = data.rfind(b"\n") + 1
    lines, torn = data[:end].split(b"\n")[:-1], data[end:]
    if not lines:
        if not is_start_of_header(torn):
            raise _foreign(path)
        return Log(torn=torn)
    header = _header(lines[0], path)
    log = Log(header=header, torn=torn, whole=end)
    for number, line in enumerate(lines[1:], start=2):
        try:
            log = _with(log, from_line(line))
        except (ValueError, KeyError, TypeError) as error:
            raise LogError(
                f"line {number} of {path} is damaged: {error}; nothing was written",
                hint=f"take the line out (sed -i.bak {number}d {path}), and the search tries that point again",
            ) from error
    if torn:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # an incomplete line
            log = replace(_with(log, from_line(torn)), is_unended=True)
    return log


def _header(line: bytes, path: Path) -> dict[str, Any]:
    try:
        header = from_line(line)
    except ValueError as error:
        if is_start_of_header(line):
            raise LogError(f"line 1 of {path} is damaged: {error}; nothing was written") from error
        raise _foreign(path) from error
    if "slapo_tune_log" not in header:
        raise _foreign(path)
    if header["slapo_tune_log"] != FORMAT:
        raise LogError(
            f"{path} is a log of format {header['slapo_tune_log']!r}; this slapo-tune reads format {FORMAT}",
            hint="pip install --upgrade slapo-tune, or give another log=",
        )
    return header


def _foreign(path: Path) -> LogError:
    return LogError(
        f"{path} exists but is not a slapo-tune log; nothing was written", hint='give another log=, e.g. "run.jsonl"'
    )


def _with(log: Log, record: Mapping[str, Any]) -> Log:
    kind = record.get("event")
    if kind == "opened":
        return replace(log, opened=(*log.opened, record))
    if kind == "started":
        return replace(log, running=(record["number"], record["point"]))
    if kind == "ended":
        trial = trial_from(record)
        if trial.number != len(log.trials):
            raise ValueError(f"trial {trial.number} stands where trial {len(log.trials)} should")
        return replace(log, trials=(*log.trials, trial), running=None)
    if kind == "verified":
        number = record["number"]
        if not 0 <= number < len(log.trials):
            raise ValueError(f"trial {number} was verified, and has not ended")
        if record["right"] is not False:
            return replace(log, verified=number) if record["right"] else log
        wrong = replace(log.trials[number], status="wrong", value=None, reason=str(record["reason"]))
        return replace(log, trials=(*log.trials[:number], wrong, *log.trials[number + 1 :]))
    raise ValueError(f"'event' is {kind!r}")


class LogFile:
    """A log that this process alone writes; a context manager.

    Every line is on disk before its method returns, and no line is ever changed: a process that is killed leaves at
    most an incomplete line at the end, which the next process cuts off. The kernel unlocks the file when its process
    ends, however that ends.

    Args:
        path: of the log; it is made if it is not there.
        header: describes the search.

    Attributes:
        log: contents when it was opened.
        repaired: description of what was cut off at its end; empty unless the last process was killed in the middle
            of a line.

    Raises:
        LogError: it cannot be written, is not a log, is of another study, is damaged, or another process writes it.
            Nothing was changed.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
        self._path = Path(path)
        header = from_line(as_line(header))  # as it is read back
        self.repaired = ""
        self._file = _opened(self._path)
        try:
            self._lock()
            self.log = parse(self._path.read_bytes(), self._path)
            if self.log.header:
                _compare(self.log.header, header, self._path)
            self._repair()
            if not self.log.header:
                self._append({"slapo_tune_log": FORMAT, **header})
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
        """Write that a trial is about to run; if nothing else is told of it, it runs again."""
        self._append({"event": "started", "number": number, "point": dict(point), "at": time.time()})

    def ended(self, trial: Trial) -> None:
        """Write that a trial has ended, or was pruned."""
        self._append(trial_line(trial))

    def verified(self, number: int, *, right: bool | None, reason: str = "") -> None:
        """Write the verification of a trial, None where it could not run; a refused trial is ``"wrong"``."""
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
            with contextlib.suppress(OSError):  # what could be written of the line is not a line
                os.ftruncate(self._file, begin)
            raise LogError(f"the log {self._path} cannot be written: {error.strerror}") from error

    def _require_file(self) -> None:
        """
        Raises:
            LogError: the file was removed or replaced.
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
                f"{len(self.log.torn)} bytes at the end of {self._path} were an incomplete line and were cut off: "
                "a process was killed while writing them"
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
        raise LogError(f"the log {path} is not an ordinary file", hint='log="run.jsonl"')
    try:
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except FileNotFoundError as error:
        raise LogError(
            f"the log {path} cannot be written: directory not found: {path.parent}", hint=f"mkdir -p {path.parent}"
        ) from error
    except OSError as error:
        raise LogError(
            f"the log {path} cannot be written: {error.strerror}", hint="give a log= in a directory of yours"
        ) from error


def _settle_directory(directory: Path) -> None:
    """Make the name of a new file as lasting as its contents."""
    descriptor = os.open(directory, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system that does not know it for directories
        os.fsync(descriptor)
    os.close(descriptor)


_TOLD_ONLY = ("versions", "started", "described", "sources", "timeout")
"""Compare headers: which fields may differ when a search is resumed."""


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
        if key == "fingerprint":
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
    return f"only {where}: {more[0].strip()}" if more else "in its function's code, not in its candidates"
