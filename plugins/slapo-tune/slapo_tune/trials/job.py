"""What the processes of a trial tell each other: a directory of files, and lines of JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Ended", "Job", "output", "read", "result", "trace", "write"]


@dataclass(frozen=True)
class Job:
    """What the guard is asked to run.

    Args:
        directory: private to the trial; removed when it has ended.
        payload: the file with the functions.
        task: what the ranks do: ``"check"``, ``"try"`` or ``"verify"``.
        ranks: how many processes.
        timeout: seconds for all of it.
        output: the file that what they print goes to.
        settings: what the task is told, as JSON.
        environment: the variables of the ranks.
    """

    directory: str
    payload: str
    task: str
    ranks: int
    timeout: float
    output: str
    settings: Mapping[str, Any]
    environment: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Ended:
    """What the guard saw.

    Args:
        codes: by rank, the exit code, or minus the signal that ended it, and when, by the clock of
            ``time.monotonic``; not of a rank that the guard ended.
        stopped: ranks that the guard ended.
        timed_out: whether it did so because the time was over.
        killed_for_memory: whether the kernel has killed a process for want of memory meanwhile.
        strays: command lines of processes that the ranks left behind, and that were ended.
        stuck: of those that could not be.
        seconds: from the start to the end.
        lost: what became of the process that the ranks are forked from; empty where nothing did.
    """

    codes: Mapping[int, tuple[int, float]]
    stopped: tuple[int, ...]
    timed_out: bool
    killed_for_memory: bool
    strays: tuple[str, ...]
    stuck: tuple[str, ...]
    seconds: float
    lost: str = ""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Ended:
        codes = {int(rank): (int(code), float(at)) for rank, (code, at) in data["codes"].items()}
        lists = {name: tuple(data[name]) for name in ("stopped", "strays", "stuck")}
        return cls(**{**data, **lists, "codes": codes})


def result(directory: str | Path, rank: int) -> Path:
    """Where a rank says what came of it; there, it is whole."""
    return Path(directory, f"rank-{rank}.json")


def trace(directory: str | Path, rank: int) -> Path:
    """Where a rank writes where it stands, when it is asked to or ended by a signal."""
    return Path(directory, f"rank-{rank}.trace")


def output(directory: str | Path) -> Path:
    """The pipe that the ranks print into."""
    return Path(directory, "output")


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file of JSON that is there as a whole or not at all."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    with beside.open("w") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def read(path: Path) -> dict[str, Any] | None:
    """What :func:`write` wrote; None if it did not."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return data if isinstance(data, dict) else None
