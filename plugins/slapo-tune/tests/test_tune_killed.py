"""kill -9 at any moment: no trial that has ended is lost, none is there twice, and the search goes on as it would."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slapo_core import RankFailedError
from slapo_core.spec.sampler import Trial
from slapo_core.testing import run_ranks
from slapo_tune import best, read_log

from . import killed

pytestmark = pytest.mark.ranks

_KEPT = """
import sys
from multiprocessing import resource_tracker
resource_tracker.ensure_running()
print(resource_tracker._resource_tracker._pid, flush=True)
sys.stdin.read()
"""
_ENDS_ALL = f"""
import subprocess, sys, psutil
from slapo_tune.trials.processes import end_all
start = lambda: subprocess.Popen([sys.executable, "-c", {_KEPT!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
kept, other = start(), start()
trackers = [int(each.stdout.readline()) for each in (kept, other)]
killed, stuck = end_all({{kept.pid}})
print(*map(psutil.pid_exists, (kept.pid, trackers[0])), len(killed), stuck)
kept.communicate()
"""


def test_who_stays_keeps_what_gives_back_its_shared_memory() -> None:
    ran = subprocess.run([sys.executable, "-c", _ENDS_ALL], check=True, capture_output=True, text=True)
    assert ran.stdout == "True True 1 []\n"


def test_a_search_that_is_killed_again_and_again_is_the_unbroken_one(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = tmp_path / "whole" / "run.jsonl"
    (unbroken,) = run_ranks(killed.without_processes, str(whole), None, world_size=1)
    assert len(unbroken) == 15
    log = tmp_path / "run.jsonl"
    ended: list[Trial] = []
    for kill in killed.KILLS:
        with pytest.raises(RankFailedError, match="SIGKILL"):
            run_ranks(killed.without_processes, str(log), kill, world_size=1)
        if log.exists():
            now = list(read_log(log).trials)
            assert [one.point for one in now[: len(ended)]] == [one.point for one in ended]
            judged = [one.status for before, one in zip(ended, now, strict=False) if one != before]
            assert set(judged) <= {"wrong"}  # by the verification of the winner
            ended = now
    (broken,) = run_ranks(killed.without_processes, str(log), None, world_size=1)
    assert broken == unbroken
    lines = log.read_text().splitlines()
    assert sum('"event":"ended"' in line for line in lines) == len(unbroken)
    assert sum('"event":"started"' in line for line in lines) <= len(unbroken) + len(killed.KILLS)
    kept, other = best(log), best(whole)
    assert (kept.number, kept.point, kept.right) == (other.number, other.point, True)
    assert not list(tmp_path.glob("*.part"))


def test_trials_end_with_the_search_and_the_next_goes_on(tmp_path: Path) -> None:
    log, pids = tmp_path / "run.jsonl", tmp_path / "pids"
    for variable, ended in (("KILL_IN_TRIAL", 0), ("KILL_IN_VERIFICATION", 2)):
        with pytest.raises(RankFailedError, match="SIGKILL"):
            run_ranks(killed.with_processes, str(log), {variable: str(log), "PIDS": str(pids)}, world_size=1)
        left = [int(pid) for pid in pids.read_text().split()]
        patience = time.monotonic() + 300
        while any(psutil.pid_exists(pid) for pid in left):  # they end by themselves, as soon as the guard is given time
            assert time.monotonic() < patience
            time.sleep(0.01)
        assert len(read_log(log).trials) == ended
    (trials,) = run_ranks(killed.with_processes, str(log), {}, world_size=1)
    assert trials == [(1, 1.0, True), (2, 2.0, True)]
