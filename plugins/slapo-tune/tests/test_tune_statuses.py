"""Whatever a trial does, it gets the right status with its reason, and the next one starts clean."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import psutil
import pytest

from slapo_tune import SearchResult, Study, read_log
from slapo_tune.samplers import Trial
from slapo_tune.search import search
from tests.messages import Messages

from . import odd_trials

pytestmark = pytest.mark.ranks

EXPECTED = {
    "train": ("ok", ""),
    "loss_is_infinite": ("wrong", "loss of step 1 is nan"),
    "loss_differs": ("wrong", "first losses are 1 and 2"),
    "nan": ("wrong", "rank 0: evaluate() must return a finite number to maximize (got nan)"),
    "none": ("wrong", "rank 0: evaluate() must return a finite number to maximize (got None)"),
    "text": ("wrong", "rank 0: evaluate() must return a finite number to maximize (got '12.5')"),
    "only_rank_0": ("wrong", "rank 1: evaluate() must return a finite number to maximize (got None)"),
    "disagree": ("wrong", "rank 0 1, rank 1 10"),
    "rank_1_raises": ("crash", "rank 1: ValueError: the kernel does not take 7 heads\n  at "),
    "rank_1_leaves": ("crash", "rank 1 ended with exit code 0"),
    "exits": ("crash", "SystemExit: 0"),
    "segfault": ("crash", " was killed by SIGSEGV\n"),
    "killed": ("crash", "rank 1 was killed by SIGKILL"),
    "kills_its_group": ("crash", " was killed by SIGKILL"),
    "no_memory": ("oom", "RuntimeError: "),
    "typed_no_memory": ("oom", "OutOfMemoryError: CUDA out of memory."),
    "eats_memory": ("oom", "can't allocate memory"),
    "prints": ("ok", ""),
    "closes_its_streams": ("ok", ""),
    "leaves_processes": ("ok", ""),
    "thread_without_end": ("ok", ""),
    "fork_and_both_go_on": ("ok", ""),
    "kills_the_server": ("ok", ""),
    "batch_raises": ("refused", "ValueError: no such batch\n  at "),
    "is_refused": ("refused", "PreconditionError: cannot apply "),
    "schedule_raises": ("refused", "KeyError: 'there is no such ratio'"),
    "only_rank_1_is_refused": ("refused", "ValueError: not on rank 1"),
}


FURTHER = (
    "loss_is_infinite", "rank_1_leaves", "exits", "killed", "kills_its_group", "typed_no_memory", "batch_raises",
    "schedule_raises", "thread_without_end",
)  # fmt: skip
TRIED = [does for does in EXPECTED if os.environ.get("SLAPO_TEST_WHOLE") or does not in FURTHER]


def space_of_all(s: Any) -> None:
    s.choose("does", TRIED)


def space_of_hanging(s: Any) -> None:
    s.choose("does", ["hang"])


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where trials write what they leave behind."""
    put = tmp_path / "left"
    put.mkdir()
    monkeypatch.setenv("ODD_TRIALS_PUT", str(put))
    get_temp_dir()  # multiprocessing keeps the one that it has made
    with tempfile.TemporaryDirectory(prefix="odd-") as own:  # where no other test's search has directories
        monkeypatch.setattr(tempfile, "tempdir", own)
        yield put


def searched(tmp_path: Path, space: Any, **settings: Any) -> SearchResult:
    study = Study(
        odd_trials.Net,
        space,
        odd_trials.schedule,
        odd_trials.evaluate,
        world_size=2,
        mesh=lambda p: {"tp": 2},
        batch=odd_trials.batch,
        optimizer=odd_trials.optimizer,
        sampler="exhaustive",
        log=tmp_path / "run.jsonl",
        process_memory="600MiB",
        accelerator="cpu",
        verify=False,
        predict=False,
        **settings,
    )
    before = psutil.Process().children(recursive=True)
    result = search(study)
    started = [process for process in psutil.Process().children(recursive=True) if process not in before]
    assert not [process for process in started if "slapo_tune" in " ".join(process.cmdline())]
    assert not [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("slapo-tune-")]
    return result


def assert_clean(left: Path, processes: int) -> None:
    pids = [int(file.stem) for file in left.glob("*.pid")]
    assert len(pids) >= processes
    patience = time.monotonic() + 300
    while any(psutil.pid_exists(pid) for pid in pids):  # they are killed, and the kernel needs a moment
        assert time.monotonic() < patience
        time.sleep(0.01)
    for file in left.glob("*.shm"):
        while Path("/dev/shm", file.read_text().lstrip("/")).exists():  # until the rank's resource tracker gets to it
            assert time.monotonic() < patience
            time.sleep(0.01)
    for file in left.glob("*.tmp"):
        assert not Path(file.read_text()).exists()


def test_trials_get_their_status_and_leave_no_processes(tmp_path: Path, left: Path, message: Messages) -> None:
    result = searched(tmp_path, space_of_all, timeout=100.0)
    trials: dict[str, Trial] = {trial.point["does"]: trial for trial in result.trials}
    for does, (status, reason) in ((does, EXPECTED[does]) for does in TRIED):
        assert (does, trials[does].status) == (does, status), trials[does].reason
        assert reason in trials[does].reason
        if status == "wrong" and does != "loss_is_infinite":  # which either rank may say first
            message(trials[does].reason, reason)
        assert (trials[does].value is not None) == (status == "ok")
    assert trials["fork_and_both_go_on"].value == 6.0
    assert trials["closes_its_streams"].value == 3.0
    assert read_log(tmp_path / "run.jsonl").trials == result.trials
    printed = tmp_path / "run.output" / f"{trials['prints'].number:04d}.txt"
    assert 500_000 < printed.stat().st_size < 600_000
    assert b"bytes left out" in printed.read_bytes()
    assert_clean(left, 2)


def test_hanging_trial_is_killed_with_its_processes(tmp_path: Path, left: Path) -> None:
    result = searched(tmp_path, space_of_hanging, timeout=4.0)
    (trial,) = result.trials
    assert trial.status == "timeout"
    assert "within 4 s" in trial.reason
    assert result.winner is None
    assert_clean(left, 0)
