"""kill -9 at any moment: no trial that has ended is lost, none is there twice, and the search goes on as it would."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from slapo_core import RankFailedError
from slapo_testing import run_ranks
from slapo_tune import best, read_log
from slapo_tune.samplers import Trial

from . import killed

pytestmark = pytest.mark.ranks


def test_repeatedly_killed_search_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    complete = tmp_path / "whole" / "run.jsonl"
    (unbroken,) = run_ranks(killed.without_processes, str(complete), None, world_size=1)
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
    kept, other = best(log), best(complete)
    assert (kept.number, kept.point, kept.right) == (other.number, other.point, True)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.breadth
def test_trials_end_with_a_killed_search_and_the_next_search_resumes(tmp_path: Path) -> None:
    log, pids = tmp_path / "run.jsonl", tmp_path / "pids"
    for variable, ended in (("KILL_IN_TRIAL", 0), ("KILL_IN_VERIFICATION", 2)):
        with pytest.raises(RankFailedError, match="SIGKILL"):
            run_ranks(killed.with_processes, str(log), {variable: str(log), "PIDS": str(pids)}, world_size=1)
        left = [int(pid) for pid in pids.read_text().split()]
        patience = time.monotonic() + 300
        while any(psutil.pid_exists(pid) for pid in left):  # they end by themselves, as soon as they are given time
            assert time.monotonic() < patience
            time.sleep(0.01)
        assert len(read_log(log).trials) == ended
    (trials,) = run_ranks(killed.with_processes, str(log), {}, world_size=1)
    assert trials == [(1, 1.0, True), (2, 2.0, True)]
