"""kill -9 of a search, or of a process of its trials, at random moments: what is lost, doubled, torn or left running.

Searches of 16 points on two ranks run one after the other until so many kills have been made. Each kill takes the
tuner, the server that ranks are forked from, or a rank, at a random moment; a tuner that was killed is
started again on its log. After each kill the log must have all trials that it had, each once; in the end every point
has been tried once, and only the processes of a trial that were killed themselves have cost a trial.

    OMP_NUM_THREADS=1 python benchmarks/tune_kills.py [--kills 100] [--seed 0] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from torch import nn

import slapo_tune
from slapo_tune import LogError, Run, read_log

RESULT = Path(__file__).parent / "results" / "tune_kills.json"
POINTS = 16
SERVER = "multiprocessing.forkserver"


def space(s: Any) -> None:
    s.choose("width", [1, 2, 4, 8])
    s.choose("depth", [1, 2, 3, 4])


def schedule(sch: Any, p: Any) -> None:
    """Nothing: what is killed does not matter."""


def evaluate(run: Run) -> float:
    time.sleep(0.2)
    return value(run.point)


def value(point: Any) -> float:
    return float(point["width"] * 10 + point["depth"])


def search(log: str, temporary: str) -> None:
    """One run of the tuner, to its end; what it imports has been imported."""
    os.environ["TMPDIR"] = tempfile.tempdir = temporary
    slapo_tune.tune(
        nn.Identity,
        space,
        schedule,
        evaluate,
        world_size=2,
        mesh=lambda p: {"dp": 2},
        sampler="exhaustive",
        log=log,
        timeout=120,
    )


@dataclass
class Counts:
    """What has happened."""

    kills: dict[str, int] = field(default_factory=Counter)
    searches: int = 0
    runs: int = 0
    trials: int = 0
    ok: int = 0
    lost: int = 0
    doubled: int = 0
    unreadable: int = 0
    torn_lines_taken_away: int = 0
    crashed_without_a_kill: int = 0
    wrong_values: int = 0
    processes_left: int = 0
    directories_left: int = 0
    repeated: int = 0


def one_search(directory: Path, counts: Counts, draw: random.Random, kills: int) -> None:
    """Kill a search until it has ended, or enough kills have been made; then let it end."""
    log = directory / "run.jsonl"
    own = directory / "tmp"
    own.mkdir()
    before: tuple[Any, ...] = ()
    of_trials = 0
    counts.searches += 1
    while True:
        counts.runs += 1
        tuner = multiprocessing.get_context("fork").Process(target=search, args=(str(log), str(own)))
        tuner.start()
        assert tuner.pid is not None
        known: dict[int, psutil.Process] = {}
        while sum(counts.kills.values()) < kills:
            wait_for_a_moment(log, tuner, draw, known)
            if not tuner.is_alive():
                break
            role = kill(tuner.pid, draw)
            counts.kills[role] += 1
            of_trials += role != "tuner"
            before = check(log, before, counts)
            if role == "tuner":
                break
        tuner.join()
        code = tuner.exitcode
        gone = psutil.wait_procs(known.values(), timeout=60)[1]
        counts.processes_left += len(gone)
        before = check(log, before, counts)
        if code == 0:
            break
        assert code == -signal.SIGKILL, f"the tuner ended with exit code {code}"
    counts.directories_left += len(list(own.glob("slapo-tune-*")))
    points = [tuple(trial.point.values()) for trial in before]
    counts.doubled += len(points) - len(set(points))
    counts.lost += POINTS - len(set(points))
    crashed = [trial for trial in before if trial.status != "ok"]
    counts.crashed_without_a_kill += max(0, len(crashed) - of_trials)
    counts.wrong_values += sum(trial.value != value(trial.point) for trial in before if trial.status == "ok")
    counts.trials += len(points)
    counts.ok += len(points) - len(crashed)
    started = sum(b'"event":"started"' in line for line in log.read_bytes().splitlines())
    counts.repeated += started - len(points)


def wait_for_a_moment(log: Path, tuner: Any, draw: random.Random, known: dict[int, psutil.Process]) -> None:
    """Until the log has some more lines, or none, and then a random while: also while the tuner starts."""
    lines, more = lines_in(log), draw.choice((0, 1, 2, 3, 4, 5, 6))
    pause = draw.uniform(0.0, 8.0 if more == 0 else 0.5)
    while tuner.is_alive() and lines_in(log) < lines + more:
        time.sleep(0.02)
    until = time.monotonic() + pause
    while tuner.is_alive():
        known |= below(tuner.pid)  # the last thing before it may be killed
        left = until - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(left, 0.2))


def lines_in(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def below(pid: int) -> dict[int, psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return {process.pid: process for process in psutil.Process(pid).children(recursive=True)}
    return {}


def kill(tuner: int, draw: random.Random) -> str:
    """Kill the tuner, or a process below it; the role of what was killed."""
    targets = [("tuner", tuner), ("tuner", tuner), ("tuner", tuner)]
    for process in below(tuner).values():
        with contextlib.suppress(psutil.Error):
            if SERVER in " ".join(process.cmdline()):
                above = process.parent()
                is_rank = above is not None and SERVER in " ".join(above.cmdline())
                targets.append(("rank" if is_rank else "server", process.pid))
    role, pid = draw.choice(targets)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return role


def check(log: Path, before: tuple[Any, ...], counts: Counts) -> tuple[Any, ...]:
    """The trials of the log; counts those that it had before and has not now."""
    if not log.exists() or log.stat().st_size == 0:
        counts.lost += len(before)
        return before
    try:
        found = read_log(log)
    except LogError as error:
        if "nothing has been written" not in str(error):
            counts.unreadable += 1
        return before
    counts.torn_lines_taken_away += bool(found.torn)
    counts.lost += sum(trial != now for trial, now in zip(before, found.trials, strict=False))
    counts.lost += max(0, len(before) - len(found.trials))
    return found.trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    arguments = parser.parse_args()
    counts, draw = Counts(), random.Random(arguments.seed)
    began = time.monotonic()
    while sum(counts.kills.values()) < arguments.kills:
        with tempfile.TemporaryDirectory() as directory:
            one_search(Path(directory), counts, draw, arguments.kills)
        say(counts, arguments.seed, time.monotonic() - began, RESULT if arguments.write else None)
    assert not any(
        getattr(counts, name)
        for name in ("lost", "doubled", "unreadable", "crashed_without_a_kill", "wrong_values", "processes_left")
    )


def say(counts: Counts, seed: int, seconds: float, file: Path | None) -> None:
    result = {
        "seed": seed,
        "points_of_a_search": POINTS,
        **asdict(counts),
        "kills": {"all": sum(counts.kills.values()), **counts.kills},
        "seconds": round(seconds),
        "python": platform.python_version(),
    }
    print(json.dumps(result), flush=True)
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
