"""What ends a search, and what it is told; without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slapo_core import ArgumentError, Sampler, UnknownNameError
from slapo_tune import LogError, Study, StudyError, read_log
from slapo_tune.search import tuning
from slapo_tune.search.events import Event, Finished, Note, Started
from slapo_tune.search.tuning import search
from slapo_tune.trials.judging import Outcome

from . import killed


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(tuning, "Trials", killed.NoTrials)
    return {"sampler": "exhaustive", "log": tmp_path / "run.jsonl", "predict": False, "verify": False}


def study(settings: dict[str, Any], **more: Any) -> Study:
    return Study(killed.Net, killed.space, killed.schedule, killed.evaluate, **{**settings, **more})


def test_at_most_so_many_trials_are_started(settings: dict[str, Any]) -> None:
    result = search(study(settings, trials=3))
    assert (len(result.trials), result.ended) == (3, "trials")
    result = search(study(settings, trials=5))
    assert (len(result.trials), result.ended) == (5, "trials")
    result = search(study(settings))
    assert (len(result.trials), result.ended, result.counts) == (15, "space", {"ok": 13, "crash": 1, "wrong": 1})


def test_nothing_is_started_when_the_time_is_over(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning.time, "monotonic", iter(range(0, 100_000, 10)).__next__)
    result = search(study(settings, budget=100.0))
    assert result.ended == "budget"
    assert 0 < len(result.trials) < 10


def test_an_interrupted_search_says_how_to_go_on(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []

    def interrupt(self: Any) -> None:
        if len([event for event in events if isinstance(event, Finished)]) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(killed.NoTrials, "tries", interrupt)
        with pytest.raises(KeyboardInterrupt):
            search(study(settings), tell=events.append)
    log = settings["log"]
    assert events[-1] == Note(f"interrupted; the log {log} is whole, and the same search goes on where it was")
    assert len(read_log(log).trials) == 2
    events.clear()
    assert len(search(study(settings), resume=True, tell=events.append).trials) == 15
    assert isinstance(events[0], Note)
    assert events[0].text.startswith("trial 2 was running when the search ended, and runs again: ")
    assert isinstance(events[1], Started)


def test_a_sampler_that_proposes_nonsense_is_named(settings: dict[str, Any]) -> None:
    class Again(Sampler):
        name = "again"

        def suggest(self, space: Any, history: Any, seed: int) -> Any:
            return next(iter(space.points()))

    class Beside(Sampler):
        name = "beside"

        def suggest(self, space: Any, history: Any, seed: int) -> Any:
            return {"batch": 77}

    with pytest.raises(StudyError, match=r"the sampler 'again' proposes .*, which the history has"):
        search(study(settings, sampler=Again()))
    with pytest.raises(LogError, match=r"its sampler is 'again', and this study's is 'beside'"):
        search(study(settings, sampler=Beside))
    settings["log"].unlink()
    with pytest.raises(StudyError, match=r"proposes {'batch': 77}, which the space does not have"):
        search(study(settings, sampler=Beside))
    with pytest.raises(StudyError, match=r"sampler must be the name of an installed one, or a .* \(got 7\)"):
        search(study(settings, sampler=7))
    with pytest.raises(UnknownNameError, match="no installed plugin provides sampler 'exhaustve'"):
        search(study(settings, sampler="exhaustve"))


def test_a_model_that_cannot_be_made_ends_the_search(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        killed.NoTrials, "run", lambda *_, **__: Outcome("refused", "ValueError: no weights", phase="model")
    )
    with pytest.raises(StudyError, match=r"^make_model, .* raises\n  ValueError: no weights"):
        search(study(settings))
    assert not read_log(settings["log"]).trials


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"world_size": 0}, r"world_size must be an integer, at least 1 \(got 0\)\n  hint: world_size=1"),
        ({"world_size": 2}, r"2 ranks need a mesh\n  hint: mesh="),
        ({"timeout": float("nan")}, "timeout must be a positive number of seconds"),
        ({"trials": 0}, "trials must be an integer, at least 1, or None"),
        ({"evaluate": None}, r"without evaluate= a study trains, and needs batch=\n  hint: batch="),
        ({"memory": "70 GiBs"}, "memory"),
        ({"memory": "1GiB", "predict": False}, r"memory='1GiB' is held against estimates"),
        (
            {"memory": "1GiB", "batch": lambda p: None, "target": "deepspeed"},
            r"estimates, which are of target 'torch', and the target is 'deepspeed'.*\n  hint: process_memory=",
        ),
        ({"schedule": "fast"}, r"schedule must be a function \(got 'fast'\)"),
        ({"accelerator": "tpu"}, "accelerator must be 'cpu', 'cuda' or None"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str) -> None:
    fine = {"make_model": killed.Net, "space": killed.space, "schedule": killed.schedule, "evaluate": killed.evaluate}
    Study(**fine)
    with pytest.raises((StudyError, ArgumentError), match=message):
        Study(**{**fine, **wrong})


def test_a_mesh_of_another_size_is_refused_where_it_is(settings: dict[str, Any]) -> None:
    result = search(study(settings, world_size=2, mesh=lambda p: {"dp": p["cut"]}))
    assert {trial.point["cut"]: trial.status for trial in result.trials if trial.point["batch"] == 1} == {
        1: "refused",
        2: "ok",
        3: "refused",
    }
    assert "the mesh {'dp': 1} has 1 ranks, and world_size is 2" in result.trials[0].reason
