"""How a search goes, while it goes: on a terminal, and in a file."""

from __future__ import annotations

import io
from typing import Any

from slapo_tune.progress import Progress
from slapo_tune.samplers import Trial
from slapo_tune.search import Note, Started, Verified

from .searched import POINTS, TRIALS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(file: io.StringIO, now: list[float], **more: Any) -> Progress:
    settings: dict[str, Any] = {"unit": "samples/s", "points": 16, "limit": None, "timeout": 300.0}
    return Progress(**{**settings, **more}, file=file, clock=lambda: now[0])


def test_progress_without_a_terminal_has_one_line_for_each_trial() -> None:
    file = io.StringIO()
    with progress(file, [0.0]) as shown:
        for trial in TRIALS[:5]:
            shown.started(trial.number, trial.point)
            shown.finished(trial)
    lines = file.getvalue().splitlines()
    assert lines[0] == (
        "trial 0 (1 of 16)  ok  10 samples/s  batch=2 checkpoint=0 kernel=plain  4.0 s  1000B  best so far  "
        "at most 1 min 0 s left"
    )
    assert lines[2].startswith(
        "trial 2 (3 of 16)  over_memory  batch=2 checkpoint=0.5 kernel=plain  needs 3.2GiB of 3GiB"
    )
    assert "Traceback" not in file.getvalue()
    assert len(lines) == 5


def test_time_left_counts_the_remaining_trials() -> None:
    now = [0.0]
    shown = progress(io.StringIO(), now, limit=4, trials=TRIALS[:2])
    assert shown.left() == 2 * 4.0  # two of four, four seconds each
    shown.started(2, POINTS[2])
    now[0] = 3.0
    assert shown.left() == 5.0
    assert progress(io.StringIO(), now).left() is None


def test_progress_on_a_terminal_shows_the_best_and_the_running_trial() -> None:
    file, now = Terminal(), [0.0]
    with progress(file, now, trials=TRIALS[:2]) as shown:
        shown.started(2, POINTS[2])
        now[0] = 8.0
        picture = str(shown._picture())
        shown.finished(Trial(2, POINTS[2], "timeout", reason="not finished within 300 s [bold]", seconds=8.0))
    assert picture.splitlines() == [
        "2 of 16 points  ok 2",
        "best  30 samples/s  batch=2 checkpoint=0 kernel=flash",
        "now   trial 2  batch=2 checkpoint=0.5 kernel=plain  8.0 s of 5 min 0 s at most",
        "left  48 s at most",
    ]
    assert "[bold]" in file.getvalue()


def test_progress_shows_notes_and_the_verification() -> None:
    file = io.StringIO()
    shown = progress(file, [0.0])
    shown.tell(Note("an incomplete line was cut off"))
    shown.tell(Started(0, POINTS[0], {}))
    shown.tell(Verified(TRIALS[1], True))
    shown.tell(Verified(TRIALS[1], False, "output differs"))
    assert file.getvalue().splitlines() == [
        "note: an incomplete line was cut off",
        "trial 1 verified",
        "trial 1 WRONG, trying the next best: output differs",
    ]
