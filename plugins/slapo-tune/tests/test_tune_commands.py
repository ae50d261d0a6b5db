"""``slapo tune``: study files that cannot be used, tables and JSON of a log, exit codes; nothing is trained here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from slapo_core import SlapoError
from slapo_tune.commands.actions import load
from slapo_tune.commands.command import TuneCommands
from slapo_tune.log import LogFile
from slapo_tune.search import Finished
from slapo_tune.space import Space
from tests.messages import Messages

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
    with LogFile(study.parent / "run.jsonl", {"fingerprint": Space.of(load(study).space).fingerprint()}) as log:
        for trial in TRIALS:
            log.ended(trial)
    return study


def slapo_tune(*words: object) -> Result:
    return CliRunner().invoke(TuneCommands().app(), [str(word) for word in words])


def refusal(*words: object) -> str:
    done = slapo_tune(*words)
    assert isinstance(done.exception, SlapoError), done.output
    return str(done.exception)


def test_unusable_study_files_are_refused_with_the_reason(tmp_path: Path, study: Path, message: Messages) -> None:
    def error_of(name: str, text: str | None) -> str:
        file = tmp_path / name
        if text is not None:
            file.write_text(text)
        return refusal("report", file)

    message(error_of("none_study.py", None), "file not found: TMP/none_study.py")
    message(error_of("study.txt", "study"), "TMP/study.txt", "not a Python file")
    message(error_of("empty_study.py", ""), "TMP/empty_study.py", "no 'study'")
    message(error_of("odd_study.py", "study = 3"), "'study' of TMP/odd_study.py", "got int")
    bad = error_of("bad_study.py", "raise ValueError(3)\n")
    message(bad, "TMP/bad_study.py", "ValueError: 3 (line 1: raise ", "python TMP/bad_study.py")
    assert "cannot be imported: SyntaxError" in error_of("syntax_study.py", "def f(:\n")
    message(
        error_of("exit_study.py", "import sys; sys.exit(3)"), "TMP/exit_study.py", "SystemExit: 3 (line 1: import sys; "
    )
    without_ranks = study.read_text().replace("sampler=", "world_size=0, sampler=")
    message(error_of("zero_study.py", without_ranks), "TMP/zero_study.py", "world_size", "got 0")
    changed = load(study, log=Path("other.jsonl"), trials=3)
    assert (changed.trials, changed.log, changed.sampler) == (3, Path("other.jsonl"), "exhaustive")


def test_missing_file_exits_with_1_and_wrong_option_with_2(tmp_path: Path, study: Path, message: Messages) -> None:
    assert slapo_tune("report", tmp_path / "none.py").exit_code == 1
    assert slapo_tune("report", study, "--tops", "3").exit_code == 2
    assert slapo_tune("report").exit_code == 2
    for command in ("report", "best"):
        text = refusal(command, study)
        assert text.endswith(f"\n  hint: slapo tune run {study}")
        message(text.replace(str(Path.cwd()), "HERE"), "log not found: TMP/run.jsonl")


def test_report_shows_the_log(searched: Path, message: Messages) -> None:
    printed = slapo_tune("report", searched, "--top", "2").output
    assert printed.startswith(
        "16 points (1 more refused by the space); 8 started, 3 pruned, 5 not tried; 32 s in trials\n"
    )
    assert "best 2 of 4 ok trials" in printed
    assert "a batch has at least 2 samples" in printed
    answer = json.loads(slapo_tune("report", searched, "--json").output)
    assert answer["best"]["number"] == 1
    assert answer["statuses"]["over_memory"] == 2
    assert answer["log"] == str(searched.parent / "run.jsonl")
    message(refusal("report", searched, "--axes", "batch"), "--axes", "got 'batch'")


@pytest.mark.parametrize("command", [("report",), ("show", "1"), ("best",)])
def test_log_of_another_space_is_refused(searched: Path, command: tuple[str, ...], message: Messages) -> None:
    other = searched.with_name(f"other_{searched.name}")
    other.write_text(searched.read_text().replace("(1, 2, 4, 8)", "(1, 2, 4, 16)"))
    message(refusal(command[0], other, *command[1:]), "TMP/run.jsonl", "another space", f"TMP/{other.name}", "--log")


def test_plot_is_written_to_its_file(searched: Path) -> None:
    plot = searched.parent / "plots" / "search.png"
    answer = json.loads(slapo_tune("report", searched, "--plot", plot, "--axes", "batch,checkpoint", "--json").output)
    assert answer["picture"] == str(plot)
    assert plot.stat().st_size > 10_000


def test_show_prints_a_trial_with_the_end_of_its_output(searched: Path, message: Messages) -> None:
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
    message(refusal("show", searched, 99), "trial 99 not found", "0 to 10")


def test_show_prints_the_space_without_a_log(study: Path) -> None:
    printed = slapo_tune("show", study).output
    assert printed.startswith("16 points, 1 more refused\n")
    assert "checkpoint  0, 0.5, 1\n" in printed
    answer = json.loads(slapo_tune("show", study, "--json").output)
    assert answer["points"] == POINTS
    assert answer["refused"] == [{"point": {"batch": 1}, "reason": "a batch has at least 2 samples"}]


def test_interrupted_run_prints_the_command_to_resume(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from slapo_tune import study as studies

    def interrupted(chosen: Any, *, resume: bool, tell: Any) -> None:
        tell(Finished(TRIALS[0]))
        raise KeyboardInterrupt

    monkeypatch.setattr(studies, "search", interrupted)
    other = study.parent / "deep" / "other.jsonl"
    done = slapo_tune("run", study, "--log", other, "--sampler", "random")
    assert done.exit_code == 130
    assert done.stdout == ""
    assert done.stderr.splitlines()[0].startswith("trial 0 (1 of 16)  ok  10 samples/s")
    assert done.stderr.splitlines()[1:] == [
        f"interrupted: all finished trials are in {other}; resume by",
        f"  slapo tune resume {study} --log {other} --sampler random",
    ]
    assert other.parent.is_dir()  # the log's directory is made


def test_run_refuses_a_log_with_trials_and_resume_one_without(searched: Path, study: Path, message: Messages) -> None:
    log = searched.parent / "run.jsonl"
    before = log.read_bytes()
    message(refusal("run", searched), "TMP/run.jsonl", "11 trials", f"slapo tune resume TMP/{searched.name}")
    message(
        refusal("resume", searched, "--log", "none.jsonl"),
        "log not found: none.jsonl",
        f"tune run TMP/{searched.name} --log",
    )
    assert "log of another study" in refusal("resume", searched)
    assert log.read_bytes() == before


def test_search_without_a_schedule_exits_with_1(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slapo_tune import study as studies

    def ended(winner: Any, trials: Any) -> Any:
        monkeypatch.setattr(
            studies,
            "search",
            lambda *_, **__: SimpleNamespace(trials=trials, winner=winner, ended="space", seconds=seconds),
        )
        return slapo_tune("run", study)

    seconds = {"trials": 45.0, "predictions": 60.0, "verification": 33.0}
    right = ended(SimpleNamespace(right=True, reason=""), TRIALS)
    assert ": trials 45 s, predictions 1 min 0 s, verification 33 s, the rest 0.0 s\n" in right.output
    assert (right.exit_code, "the best schedule is verified" in right.output) == (0, True)
    unknown = ended(SimpleNamespace(right=None, reason="timeout"), TRIALS)
    assert (unknown.exit_code, "not verified: timeout" in unknown.output) == (0, True)
    none = ended(None, TRIALS[2:6])
    assert none.exit_code == 1
    assert "the search ended: the sampler proposes nothing more\n  1 oom: rank 1 ran" in none.output


def test_best_needs_an_ok_trial(searched: Path, monkeypatch: pytest.MonkeyPatch, message: Messages) -> None:
    from slapo_tune.commands import actions

    def proved(right: bool | None) -> Any:
        document = {"slapo_schedule": 1, "records": []}
        winner = SimpleNamespace(
            number=1, point=POINTS[1], value=30.0, document=document, right=right, reason="differs", text="checked",
            versions={}, apply=lambda model, example_inputs: SimpleNamespace(records=[], explain=lambda: ""),
        )  # fmt: skip
        monkeypatch.setattr(actions, "verify_winner", lambda study, trial: winner)
        return winner

    out = searched.parent / "new" / "schedule.json"
    proved(None)
    done = slapo_tune("best", searched, "--out", out)
    assert (done.exit_code, "not verified: differs" in done.output) == (1, True)
    out.unlink()
    proved(False)
    done = slapo_tune("best", searched, "--out", out)
    assert (done.exit_code, out.exists(), "WRONG: differs" in done.output) == (1, False, True)
    proved(True)
    assert slapo_tune("best", searched, "--out", out).exit_code == 0
    kept = json.loads(out.read_text())
    assert (kept["records"], kept["tuned"]["point"]) == ([], POINTS[1])
    assert json.loads(slapo_tune("best", searched, "--json").output)["trial"]["number"] == 1
    message(refusal("best", searched, "--trial", 4), "trial 4", "oom: rank 1 ran out of memory\nTraceback ...")
    assert "cannot be written: " in refusal("best", searched, "--out", searched / "no" / "x.json")
