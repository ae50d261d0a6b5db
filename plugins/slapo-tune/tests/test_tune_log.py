"""The log: a line is there as a whole or not at all, and nobody writes into what is not theirs."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest

from slapo_core import Trial
from slapo_tune import LogError, read_log
from slapo_tune.log import LogFile
from tests.messages import Messages

HEADER = {"fingerprint": "abc", "described": "2 points\nbatch  1, 2", "seed": 0, "versions": {"torch": "1"}}
FIRST = Trial(0, {"batch": 1, "cut": (1, (2, None)), "ratio": 0.1}, "ok", 2.5, "", {"memory": 7}, {"spread": 0.5}, 1.5)
SECOND = Trial(1, {"batch": 2, "cut": (), "ratio": 1.0}, "crash", None, "rank 0: é \n", {}, {"loss": math.inf}, 0.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    with LogFile(path, HEADER) as log:
        log.started(0, FIRST.point)
        log.ended(FIRST)
        log.started(1, SECOND.point)
        log.ended(SECOND)
    return path


def test_trials_round_trip_through_the_log(path: Path) -> None:
    log = read_log(path)
    assert log.trials == (FIRST, SECOND)
    assert type(log.trials[0].point["cut"]) is tuple
    assert log.header["seed"] == 0
    assert log.running is None
    assert b"NaN" not in path.read_bytes()
    assert b"Infinity" not in path.read_bytes()


def test_truncated_log_keeps_complete_lines_and_continues(path: Path) -> None:
    data = path.read_bytes()
    ends = [end + 1 for end in range(len(data)) if data[end : end + 1] == b"\n"]
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        with LogFile(path, HEADER) as log:
            complete = data[:length].count(b"\n") + (length + 1 in ends)  # all of a line but its end is a line
            assert len(log.log.trials) == (complete >= 4) + (complete >= 6)
            assert (log.log.running is not None) == (complete in (3, 5))
            assert bool(log.repaired) == (length not in (0, *ends))
            log.verified(0, right=True) if complete >= 4 else None
        again = read_log(path)
        assert again.trials == (FIRST, SECOND)[: (complete >= 4) + (complete >= 6)]
        assert not again.torn


def test_log_in_use_names_its_process(path: Path) -> None:
    with LogFile(path, HEADER):
        before = path.read_bytes()
        with pytest.raises(LogError) as refused:
            LogFile(path, HEADER)
        assert f"process {os.getpid()} on {os.uname().nodename}" in str(refused.value)
        assert str(path) in str(refused.value)
        assert path.read_bytes() == before
    LogFile(path, HEADER).__exit__(None, None, None)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({**HEADER, "seed": 1}, ("seed is 0", "has 1;")),
        (
            {**HEADER, "fingerprint": "x", "described": "2 points\nbatch  1, 3"},
            ("space", "\n  there: batch  1, 2\n  here:  batch  1, 3"),
        ),
        ({**HEADER, "target": "megatron"}, ("target is None", "'megatron'")),
    ],
)
def test_log_of_another_study_is_refused(
    path: Path, header: dict[str, object], words: tuple[str, ...], message: Messages
) -> None:
    before = path.read_bytes()
    with pytest.raises(LogError) as refused:
        LogFile(path, header)
    message(refused, *words, 'hint: log="')
    assert path.read_bytes() == before


def test_other_versions_are_the_same_study(path: Path) -> None:
    with LogFile(path, {**HEADER, "versions": {"torch": "2"}}) as log:
        assert len(log.log.trials) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"my thesis\n",
        b"x",
        b'{"batch": 1}\n',
        b"\x00" * 100,
        b'{"slapo_tune_predictions":1}\n',
        b'{"slapo_tune_log":2}\n',
    ],
)
def test_foreign_file_is_refused_unchanged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "thesis.txt"
    path.write_bytes(content)
    with pytest.raises(LogError):
        LogFile(path, HEADER)
    with pytest.raises(LogError):
        read_log(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"",
        b"[1]",
        b'{"event":"ended"}',
        b'{"event":"ended","number":1,"point":{},"status":"fine"}',
        b'{"event":"verified","number":9,"right":true}',
        b'{"event":"other"}',
    ],
)
def test_damaged_line_is_named(path: Path, line: bytes) -> None:
    lines = path.read_bytes().split(b"\n")
    damaged = b"\n".join([*lines[:4], line, *lines[4:]])
    path.write_bytes(damaged)
    for read in (read_log, lambda path: LogFile(path, HEADER)):
        with pytest.raises(LogError, match=f"^line 5 of {path} "):
            read(path)
    assert path.read_bytes() == damaged


def test_duplicate_trial_is_damage(path: Path) -> None:
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:4], lines[3], *lines[4:]]))
    with pytest.raises(LogError, match=r"line 5 .*got trial 0"):
        read_log(path)


def test_trial_that_fails_verification_is_wrong(path: Path) -> None:
    with LogFile(path, HEADER) as log:
        log.verified(0, right=False, reason="gradients differ")
    trial = read_log(path).trials[0]
    assert (trial.status, trial.value, trial.reason) == ("wrong", None, "gradients differ")


def test_unwritable_logs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: Messages) -> None:
    for path, word in (
        (tmp_path, "is a directory"),
        (tmp_path / "no" / "run.jsonl", "directory not found"),
        (Path("/proc/run.jsonl"), "cannot be written"),
        (Path("/dev/null"), "is not a regular file"),
    ):
        with pytest.raises(LogError, match=word):
            LogFile(path, HEADER)

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("slapo_tune.log.os.open", refuse)
    with pytest.raises(LogError) as caught:
        LogFile(tmp_path / "run.jsonl", HEADER)
    message(caught, "TMP/run.jsonl", "Permission denied\n  hint: ")


def test_full_disk_leaves_complete_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    write = os.write
    with LogFile(path, HEADER) as log:
        opened = path.read_bytes()

        def full(descriptor: int, data: bytes) -> int:
            if len(data) > 20:
                return write(descriptor, data[:20])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("slapo_tune.log.os.write", full)
        with pytest.raises(LogError, match="No space left on device"):
            log.started(2, {"batch": 3})
        monkeypatch.undo()
    assert path.read_bytes() == opened
    assert opened.startswith(before)


def test_removed_log_ends_the_search(path: Path, message: Messages) -> None:
    with LogFile(path, HEADER) as log:
        path.rename(path.with_name("moved.jsonl"))
        with pytest.raises(LogError) as caught:
            log.started(2, {"batch": 3})
        message(caught, "removed or replaced")
        path.write_text("")
        with pytest.raises(LogError, match="removed or replaced"):
            log.ended(FIRST)
    assert len(read_log(path.with_name("moved.jsonl")).trials) == 2
    assert path.read_bytes() == b""
