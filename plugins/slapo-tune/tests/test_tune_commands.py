"""``slapo tune``: study files that cannot be used, tables and JSON of a log, progress; nothing is trained here."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from slapo_core import SlapoError
from slapo_core.spec.sampler import Trial
from slapo_tune.commands.command import TuneCommands
from slapo_tune.commands.loading import load
from slapo_tune.commands.progress import Progress
from slapo_tune.log.writing import LogFile

from .searched import POINTS, TRIALS

STUDY = """
import torch
import slapo_tune

def make_model():
    return torch.nn.Linear(4, 4)

def space(s):
    batch = s.choose("batch", (1, 2, 4, 8))
    s.require(batch > 1, "a batch has at least 2 samples")
    s.choose("checkpoint", (0.5, 1.0) if batch == 8 else (0.0, 0.5, 1.0))
    s.choose("kernel", ("plain", "flash"))

def schedule(sch, p):
    pass

def batch(p):
    return torch.randn(p["batch"], 4)

study = slapo_tune.Study(
    make_model, space, schedule, batch=batch, optimizer=torch.optim.SGD, log={log!r}, sampler="exhaustive"
)
"""


@pytest.fixture(autouse=True)
def no_study_left() -> Iterator[None]:
    known, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - known:
        if name.endswith("_study"):
            del sys.modules[name]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study with a log of every status."""
    file = tmp_path / f"{re.sub('[^a-z]', '_', tmp_path.name)}_study.py"
    file.write_text(STUDY.format(log=str(tmp_path / "run.jsonl")))
    return file


@pytest.fixture
def searched(study: Path) -> Path:
    with LogFile(study.parent / "run.jsonl", {"fingerprint": "f"}) as log:
        for trial in TRIALS:
            log.ended(trial)
    return study


def slapo_tune(*words: object) -> Result:
    return CliRunner().invoke(TuneCommands().app(), [str(word) for word in words])


def message(*words: object) -> str:
    done = slapo_tune(*words)
    assert isinstance(done.exception, SlapoError), done.output
    return str(done.exception)


def test_study_files_that_cannot_be_used_are_named_with_the_reason(tmp_path: Path, study: Path) -> None:
    def said(name: str, text: str | None) -> str:
        file = tmp_path / name
        if text is not None:
            file.write_text(text)
        return message("report", file).replace(str(tmp_path), "DIR")

    assert said("none_study.py", None) == "there is no file DIR/none_study.py\n  hint: slapo tune run STUDY.py"
    assert said("study.txt", "study") == "DIR/study.txt is no Python file\n  hint: slapo tune run STUDY.py"
    assert said("empty_study.py", "") == (
        "DIR/empty_study.py has no 'study' at its top level\n"
        "  hint: study = slapo_tune.Study(make_model, space, schedule, ...)"
    )
    assert "'study' of DIR/odd_study.py is no slapo_tune.Study (got int)" in said("odd_study.py", "study = 3")
    assert said("bad_study.py", "x = 1\nx / 0\n") == (
        "DIR/bad_study.py cannot be imported: ZeroDivisionError: division by zero (line 2: x / 0)\n"
        "  hint: python DIR/bad_study.py shows the whole traceback"
    )
    assert "cannot be imported: SyntaxError" in said("syntax_study.py", "def f(:\n")
    assert "cannot be imported: SystemExit: 3 (line 1: import sys; " in said("exit_study.py", "import sys; sys.exit(3)")
    assert "world_size must be an integer, at least 1 (got 0)" in said(
        "zero_study.py", study.read_text().replace("sampler=", "world_size=0, sampler=")
    )
    changed = load(study, log=Path("other.jsonl"), trials=3)
    assert (changed.trials, changed.log, changed.sampler) == (3, Path("other.jsonl"), "exhaustive")


def test_a_missing_file_and_a_wrong_option_end_with_1_and_2(tmp_path: Path, study: Path) -> None:
    assert slapo_tune("report", tmp_path / "none.py").exit_code == 1
    assert slapo_tune("report", study, "--tops", "3").exit_code == 2
    assert slapo_tune("report").exit_code == 2
    assert "cannot be read: No such file or directory" in message("report", study)


def test_the_report_says_what_the_log_says(searched: Path) -> None:
    printed = slapo_tune("report", searched, "--top", "2").output
    assert printed.startswith("16 points (1 more refused by the space); 8 started, 3 pruned, 5 not tried; 32 s\n")
    assert "the best 2 of 4 that were ok" in printed
    assert "a batch has at least 2 samples" in printed
    answer = json.loads(slapo_tune("report", searched, "--json").output)
    assert answer["best"]["number"] == 1
    assert answer["statuses"]["over_memory"] == 2
    assert answer["log"] == str(searched.parent / "run.jsonl")
    assert message("report", searched, "--axes", "batch").startswith("--axes must be two symbols (got 'batch')")


def test_pictures_are_written_where_they_are_asked_for(searched: Path) -> None:
    plots = searched.parent / "plots"
    answer = json.loads(slapo_tune("report", searched, "--plots", plots, "--axes", "batch,checkpoint", "--json").output)
    assert answer["pictures"] == [str(plots / f"{name}.png") for name in ("space", "path", "best", "prediction")]
    assert all(Path(file).stat().st_size > 10_000 for file in answer["pictures"])


def test_a_trial_is_shown_with_the_end_of_its_output(searched: Path) -> None:
    output = searched.parent / "run.output" / "0004.txt"
    output.parent.mkdir()
    output.write_text("".join(f"line {number}\n" for number in range(30)))
    printed = slapo_tune("show", searched, 4).output
    assert printed.startswith("trial 4  oom  4.0 s\n\n  batch = 2\n  checkpoint = 1\n  kernel = plain\n")
    assert "rank 1 ran out of memory\nTraceback ..." in printed
    assert f"{output} (the last 20 of 30 lines)\n  line 10\n" in printed
    assert printed.endswith("  line 29\n")
    numbers = slapo_tune("show", searched, 1).output
    assert re.search(r"memory +2.93KiB +1.95KiB\ntime +75 ms +100 ms\n", numbers)
    answer = json.loads(slapo_tune("show", searched, 4, "--json").output)
    assert (answer["status"], answer["output"], answer["point"]) == ("oom", str(output), POINTS[4])
    assert message("show", searched, 99) == "there is no trial 99: the log has trials 0 to 10"


def test_the_space_is_shown_without_a_log(study: Path) -> None:
    printed = slapo_tune("show", study).output
    assert printed.startswith("16 points, 1 more refused\n")
    assert "checkpoint  0, 0.5, 1\n" in printed
    answer = json.loads(slapo_tune("show", study, "--json").output)
    assert answer["points"] == POINTS
    assert answer["refused"] == [{"point": {"batch": 1}, "reason": "a batch has at least 2 samples"}]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(file: io.StringIO, now: list[float], **more: Any) -> Progress:
    settings: dict[str, Any] = {"unit": "samples/s", "points": 16, "limit": None, "timeout": 300.0}
    return Progress(**{**settings, **more}, file=file, clock=lambda: now[0])


def test_progress_without_a_terminal_is_one_line_a_trial() -> None:
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


def test_the_time_left_is_that_of_the_trials_still_allowed() -> None:
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
