"""Searches that are killed with SIGKILL at a named point; run in a process of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import Sampler
from slapo_tune import Run, Study, search as tuning, winner
from slapo_tune.log import LogFile
from slapo_tune.outcomes import Outcome
from slapo_tune.search import search
from slapo_tune.trials import TrialRunner


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)


def space(s: Any) -> None:
    s.choose("batch", range(1, 4 + s.choose("cut", [1, 2, 3])))


def schedule(sch: Any, p: Any) -> None:
    """Nothing; or the end of the tuner, where the last trial has ended and the winner is verified."""
    log = os.environ.get("KILL_IN_VERIFICATION")
    if log is not None and Path(log).read_bytes().count(b'"ended"') == 2:
        put_down_and_kill()


def evaluate(run: Run) -> float:
    if run.point["batch"] == 1 and "KILL_IN_TRIAL" in os.environ:
        put_down_and_kill()
    return float(run.point["batch"])


def batch(p: Any) -> torch.Tensor:
    return torch.ones(2, 4)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.sum()


def put_down_and_kill() -> None:
    Path(os.environ["PIDS"]).write_text(f"{os.getpid()} {os.getppid()}")
    os.kill(int(os.environ["TUNER"]), signal.SIGKILL)
    time.sleep(1000)


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(cls: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(cls, name, die)


def after(cls: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    method = getattr(cls, name)

    def call(*args: Any, **kwargs: Any) -> None:
        method(*args, **kwargs)
        die()

    return lambda patch: patch.setattr(cls, name, call)


def in_line(patch: pytest.MonkeyPatch) -> None:
    write = os.write

    def half(descriptor: int, data: bytes) -> int:
        if b'"event":"ended"' in data:
            write(descriptor, data[: len(data) // 2])
            die()
        return write(descriptor, data)

    patch.setattr("slapo_tune.log.os.write", half)


def before_fsync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogFile, "ended", lambda self, trial: (patch.setattr(os, "fsync", die), ENDED(self, trial)))


ENDED = LogFile.ended

KILLS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before the start line": before(LogFile, "started"),
    "after the start line": after(LogFile, "started"),
    "in the middle of a trial": lambda patch: patch.setattr(NoTrials, "tries", die),
    "after the result, before the log": before(LogFile, "ended"),
    "in the middle of a line": in_line,
    "before the line is on disk": before_fsync,
    "after the line is on disk": after(LogFile, "ended"),
    "before the winner is verified": lambda patch: patch.setattr(NoTrials, "proves", die),
    "before the winner is kept": lambda patch: patch.setattr(tuning, "save", die),
    "while the winner is kept": lambda patch: patch.setattr(winner.os, "replace", die),
    "after the winner is kept": before(LogFile, "verified"),
}
"""What is put in the place of what, so that the process is killed there; in this order, each comes to be."""


class NoTrials(TrialRunner):
    """Does not start processes: the value is a function of the point."""

    def run(self, task: str, point: Any, mesh: Any, **settings: Any) -> Outcome:
        if task == "try":
            self.tries()
            fails = point["batch"] == 3 and point["cut"] == 2
            return Outcome("crash", "rank 0 died") if fails else Outcome("ok", value=point["batch"] / point["cut"])
        if task == "verify":
            self.proves()
            right = point["batch"] != 4
            return Outcome("ok", result={"document": {}}) if right else Outcome("wrong", "gradients differ")
        return Outcome("ok")

    def tries(self) -> None: ...

    def proves(self) -> None: ...


class Slow(Sampler):
    """As random; begins with trials enough for every way to be killed."""

    name = "slow"

    def suggest(self, space: Any, history: Any, seed: int) -> Any:
        import random

        left = [point for point in space.points() if point not in [trial.point for trial in history]]
        values = sum(trial.value or 0.0 for trial in history)  # the history counts, not only its length
        return random.Random(f"{seed} {values}").choice(left) if left else None


def without_processes(log: str, kill: str | None) -> list[Any]:
    """The points of a search whose trials take no time."""
    os.chdir(Path(log).parent)
    study = Study(Net, space, schedule, evaluate, batch=batch, sampler=Slow, log=log, seed=3, predict=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "TrialRunner", NoTrials)
        if kill is not None:
            KILLS[kill](patch)
        result = search(study)
    assert result.winner is not None
    return [(trial.number, dict(trial.point), trial.status, trial.value) for trial in result.trials]


def with_processes(log: str, environment: dict[str, str]) -> list[Any]:
    """A search whose trials kill it."""
    os.environ.update(environment, TUNER=str(os.getpid()))
    study = Study(
        Net,
        lambda s: s.choose("batch", [1, 2]),
        schedule,
        evaluate,
        batch=batch,
        loss=loss,
        sampler="exhaustive",
        log=log,
        predict=False,
    )
    result = search(study)
    assert result.winner is not None
    return [(trial.point["batch"], trial.value, result.winner.right) for trial in result.trials]
