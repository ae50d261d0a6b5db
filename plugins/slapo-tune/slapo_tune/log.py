"""The log of a search: a line for each trial, on disk before the next."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from slapo_tune.errors import LogError
from slapo_tune.plain_data import decode
from slapo_tune.samplers import STATUSES, Point, Trial

FORMAT = 1
"""The version of the format; a header says ``{"slapo_tune_log": FORMAT, ...}``."""

_HEADER = '{"slapo_tune_log":'


def as_line(record: Mapping[str, Any]) -> bytes:
    """Encode a line. NaN and infinity, which JSON lacks, become ``{"float": "nan"}``."""
    return json.dumps(_safe(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def is_start_of_header(data: bytes) -> bool:
    """Return whether these bytes are a header or its beginning."""
    header = _HEADER.encode()
    return data[: len(header)] == header[: len(data)]


def from_line(line: bytes) -> dict[str, Any]:
    """Decode a line.

    Raises:
        ValueError: not one JSON object.
    """
    record = _restored(json.loads(line.decode()))
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def trial_from(record: Mapping[str, Any]) -> Trial:
    """Return the trial of a record.

    Raises:
        ValueError: a field is missing or has a wrong type.
    """
    for name, kind in (("number", int), ("point", dict), ("reason", str), ("predicted", dict), ("measured", dict)):
        if not isinstance(record.get(name), kind) or isinstance(record[name], bool):
            raise ValueError(f"'{name}' is {record.get(name)!r}")
    if record.get("status") not in STATUSES:
        raise ValueError(f"'status' is {record.get('status')!r}")
    value = record.get("value")
    if (value is None) == (record["status"] == "ok") or not isinstance(value, (int, float, type(None))):
        raise ValueError(f"'value' is {value!r} and 'status' is {record['status']!r}")
    known = {item.name: record[item.name] for item in fields(Trial) if item.name in record}
    return Trial(**{**known, "point": decode(record["point"]), "seconds": float(record.get("seconds", 0.0))})


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


@dataclass(frozen=True)
class Log:
    """The contents of a log.

    Args:
        header: the study's header; empty if nothing has been written yet.
        trials: ended trials in order; a trial that fails verification is ``"wrong"``.
        running: number and point of the trial that was started and has not ended; None without one.
        verified: number of the last trial that passed verification; None without one.
        opened: process, host and time of each ``tune`` that wrote.
        torn: bytes of an incomplete line at the end: a process was killed while writing the line.
        complete: number of bytes of complete lines.
        lacks_newline: whether the torn bytes only lack the newline.
    """

    header: Mapping[str, Any] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    running: tuple[int, Mapping[str, Any]] | None = None
    verified: int | None = None
    opened: tuple[Mapping[str, Any], ...] = ()
    torn: bytes = b""
    complete: int = 0
    lacks_newline: bool = False


def read_log(path: str | os.PathLike[str]) -> Log:
    """Read a log, also while a search writes it: an incomplete last line is ignored.

    Args:
        path: path of the log.

    Raises:
        LogError: not found, not readable, not a slapo-tune log, or a damaged line.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LogError(f"the log {path} cannot be read: {error.strerror}") from error
    log = parse(data, path)
    if not log.header:
        raise LogError(f"{path} is not a complete log: the header is not written yet")
    return log


def parse(data: bytes, path: Path) -> Log:
    """Parse the bytes of a log.

    Raises:
        LogError: not a slapo-tune log, or a line before the last is damaged.
    """
    end = data.rfind(b"\n") + 1
    lines, torn = data[:end].split(b"\n")[:-1], data[end:]
    if not lines:
        if not is_start_of_header(torn):
            raise _not_a_log(path)
        return Log(torn=torn)
    header = _header(lines[0], path)
    log = Log(header=header, torn=torn, complete=end)
    for number, line in enumerate(lines[1:], start=2):
        try:
            log = _with(log, from_line(line))
        except (ValueError, KeyError, TypeError) as error:
            raise LogError(
                f"line {number} of {path} is damaged: {error}; nothing was written",
                hint=f"sed -i.bak {number}d {path} removes the line; the search then repeats its trial",
            ) from error
    if torn:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # an incomplete line
            log = replace(_with(log, from_line(torn)), lacks_newline=True)
    return log


def _header(line: bytes, path: Path) -> dict[str, Any]:
    try:
        header = from_line(line)
    except ValueError as error:
        if is_start_of_header(line):
            raise LogError(f"line 1 of {path} is damaged: {error}; nothing was written") from error
        raise _not_a_log(path) from error
    if "slapo_tune_log" not in header:
        raise _not_a_log(path)
    if header["slapo_tune_log"] != FORMAT:
        raise LogError(
            f"{path} is a log of format {header['slapo_tune_log']!r}; this slapo-tune reads format {FORMAT}",
            hint="pip install --upgrade slapo-tune, or give another log=",
        )
    return header


def _not_a_log(path: Path) -> LogError:
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
            raise ValueError(f"expected trial {len(log.trials)} (got trial {trial.number})")
        return replace(log, trials=(*log.trials, trial), running=None)
    if kind == "verified":
        number = record["number"]
        if not 0 <= number < len(log.trials):
            raise ValueError(f"trial {number} is verified before its end")
        if record["right"] is not False:
            return replace(log, verified=number) if record["right"] else log
        wrong = replace(log.trials[number], status="wrong", value=None, reason=str(record["reason"]))
        return replace(log, trials=(*log.trials[:number], wrong, *log.trials[number + 1 :]))
    raise ValueError(f"'event' is {kind!r}")


class LogFile:
    """A log that only this process writes; a context manager.

    Each line is on disk before its method returns, and no line ever changes: a killed process leaves at most an
    incomplete line at the end, which the next process removes. The kernel unlocks the file whenever the process ends.

    Args:
        path: path of the log; created if missing.
        header: identifies the search.

    Attributes:
        log: the contents when the file was opened.
        repaired: description of a repair at the end of the file; empty unless a process was killed within a line.

    Raises:
        LogError: not writable, not a log, of another study, damaged, or in use. The file is unchanged.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
        self._path = Path(path)
        header = from_line(as_line(header))  # as JSON returns it
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
                _sync_directory(self._path.parent)
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
        """Write the start of a trial; without an end it runs again."""
        self._append({"event": "started", "number": number, "point": dict(point), "at": time.time()})

    def ended(self, trial: Trial) -> None:
        """Write the end of a trial that ran or was pruned."""
        self._append({"event": "ended", **vars(trial)})

    def verified(self, number: int, *, right: bool | None, reason: str = "") -> None:
        """Write the verification of a trial; ``right=None`` if it could not run."""
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
            with contextlib.suppress(OSError):  # removes the incomplete line
                os.ftruncate(self._file, begin)
            raise LogError(f"the log {self._path} cannot be written: {error.strerror}") from error

    def _require_file(self) -> None:
        """Require that the path still names the open file.

        Raises:
            LogError: the file was removed or replaced.
        """
        try:
            is_there = os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except OSError:
            is_there = False
        if not is_there:
            raise LogError(f"the log {self._path} was removed or replaced during the search; writing stops")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            opened = parse(self._path.read_bytes(), self._path).opened
            holder = f"process {opened[-1]['pid']} on {opened[-1]['host']}" if opened else "another process"
            raise LogError(
                f"the log {self._path} is in use by {holder}",
                hint="wait for that search, end it, or give another log=",
            ) from None
        except OSError as error:
            raise LogError(
                f"the log {self._path} cannot be locked: {error.strerror}",
                hint="put the log on a local disk: log=",
            ) from error

    def _repair(self) -> None:
        if not self.log.torn:
            return
        if self.log.lacks_newline:
            os.write(self._file, b"\n")
            self.repaired = f"added the missing newline at the end of {self._path}; the line is complete"
        else:
            os.ftruncate(self._file, self.log.complete)
            self.repaired = (
                f"removed an incomplete line of {len(self.log.torn)} bytes at the end of {self._path}: a process was "
                "killed while writing it"
            )
        os.fsync(self._file)


def _opened(path: Path) -> int:
    """Open or create the file.

    Raises:
        LogError: not a file that can be read and written.
    """
    if path.is_dir():
        raise LogError(f"the log {path} is a directory", hint=f'log="{path / "run.jsonl"}"')
    if path.exists() and not path.is_file():
        raise LogError(f"the log {path} is not a regular file", hint='log="run.jsonl"')
    try:
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except FileNotFoundError as error:
        raise LogError(
            f"the log {path} cannot be written: directory not found: {path.parent}", hint=f"mkdir -p {path.parent}"
        ) from error
    except OSError as error:
        raise LogError(
            f"the log {path} cannot be written: {error.strerror}", hint="log= in a writable directory"
        ) from error


def _sync_directory(directory: Path) -> None:
    """Write the name of a new file to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    with contextlib.suppress(OSError):  # not supported by all file systems
        os.fsync(descriptor)
    os.close(descriptor)


_MAY_DIFFER = ("versions", "started", "described", "sources", "timeout")
"""Fields of a header that may differ when a search is resumed."""


def _compare(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """Compare two headers.

    Raises:
        LogError: the headers are of different studies; with the first difference.
    """
    old = {key: value for key, value in old.items() if key != "slapo_tune_log"}
    for key in dict.fromkeys([*new, *old]):
        was, is_now = old.get(key), new.get(key)
        if key in _MAY_DIFFER or was == is_now:
            continue
        what = f"its {key} is {was!r}; this study has {is_now!r}"
        if key == "fingerprint":
            was, is_now = old.get("described"), new.get("described")
            what = f"its space differs\n  {_difference(str(was), str(is_now))}"
        raise LogError(
            f"{path} is the log of another study: {what}; nothing was written",
            hint=f'log="{path.with_name(path.stem + "-2" + path.suffix)}" starts a new log',
        )


def _difference(old: str, new: str) -> str:
    """Return the first differing line of two descriptions."""
    olds, news = old.splitlines(), new.splitlines()
    for was, is_now in zip(olds, news, strict=False):
        if was != is_now:
            return f"there: {was.strip()}\n  here:  {is_now.strip()}"
    more = olds[len(news) :] or news[len(olds) :]
    where = "there" if len(olds) > len(news) else "here"
    return f"only {where}: {more[0].strip()}" if more else "equal symbols and candidates, but other points"
