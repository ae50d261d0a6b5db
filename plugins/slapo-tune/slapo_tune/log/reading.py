"""`read_log`: what a log says, without touching it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slapo_core.spec.sampler import Trial
from slapo_tune.errors import LogError
from slapo_tune.log.format import FORMAT, from_line, is_start_of_header, trial_from

__all__ = ["Log", "parse", "read_log"]


@dataclass(frozen=True)
class Log:
    """What a log says.

    Args:
        header: the study's; empty where nothing has been written yet.
        trials: those that have ended, in order; one that the verification refused is ``"wrong"``.
        running: number and point of the trial that was started and has not ended; None if there is none.
        verified: the number of the trial that was verified last and found right; None if there is none.
        opened: who has written: process, host and time of each ``tune`` in turn.
        torn: bytes at the end that are no whole line: a process was killed while it wrote them.
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
        LogError: there is none, it cannot be read, it is no log of slapo-tune, or a line of it is damaged.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LogError(f"the log {path} cannot be read: {error.strerror}") from error
    log = parse(data, path)
    if not log.header:
        raise LogError(f"{path} is no log yet: nothing has been written")
    return log


def parse(data: bytes, path: Path) -> Log:
    """What these bytes of a log say.

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
        with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line: nobody knows what it would have said
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
        f"{path} is a file, and no log of slapo-tune; nothing was written", hint='give another log=, e.g. "run.jsonl"'
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
