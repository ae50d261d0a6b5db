"""What ends a search, and what it is told; without processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from slapo_core import ArgumentError, LaunchError, Sampler, UnknownNameError
from slapo_runtime.launcher import ServerEndedError
from slapo_tune import LogError, Study, StudyError, read_log, search as tuning, trials
from slapo_tune.outcomes import Outcome, RaisedError
from slapo_tune.search import Event, Finished, Note, Started, search
from tests.messages import Messages

from . import killed


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(tuning, "TrialRunner", killed.NoTrials)
    return {"sampler": "exhaustive", "log": tmp_path / "run.jsonl", "predict": False, "verify": False}


def study(settings: dict[str, Any], **more: Any) -> Study:
    return Study(killed.Net, killed.space, killed.schedule, killed.evaluate, **{**settings, **more})


def test_limit_of_started_trials(settings: dict[str, Any]) -> None:
    result = search(study(settings, trials=3))
    assert (len(result.trials), result.ended) == (3, "trials")
    result = search(study(settings, trials=5))
    assert (len(result.trials), result.ended) == (5, "trials")
    result = search(study(settings))
    assert (len(result.trials), result.ended, result.counts) == (15, "space", {"ok": 13, "crash": 1, "wrong": 1})


def test_no_trial_starts_after_the_budget(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning.time, "monotonic", iter(range(0, 100_000, 10)).__next__)
    result = search(study(settings, budget=100.0))
    assert result.ended == "budget"
    assert 0 < len(result.trials) < 10


def test_interrupted_search_notes_how_to_resume(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, message: Messages
) -> None:
    events: list[Event] = []

    def interrupt(self: Any) -> None:
        if len([event for event in events if isinstance(event, Finished)]) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(killed.NoTrials, "tries", interrupt)
        with pytest.raises(KeyboardInterrupt):
            search(study(settings), tell=events.append)
    log = settings["log"]
    assert isinstance(events[-1], Note)
    assert str(log) in events[-1].text
    message(events[-1].text, "interrupted")
    assert len(read_log(log).trials) == 2
    events.clear()
    assert len(search(study(settings), resume=True, tell=events.append).trials) == 15
    assert isinstance(events[0], Note)
    message(events[0].text, "trial 2", "again")
    assert isinstance(events[1], Started)


def test_invalid_proposals_name_the_sampler(settings: dict[str, Any], message: Messages) -> None:
    class Again(Sampler):
        name = "again"

        def suggest(self, space: Any, history: Any, seed: int) -> Any:
            return next(iter(space.points()))

    class Beside(Sampler):
        name = "beside"

        def suggest(self, space: Any, history: Any, seed: int) -> Any:
            return {"batch": 77}

    with pytest.raises(StudyError) as caught:
        search(study(settings, sampler=Again()))
    message(caught, "'again' proposes", "was already tried")
    with pytest.raises(LogError) as other:
        search(study(settings, sampler=Beside))
    message(other, "'again'", "'beside'")
    settings["log"].unlink()
    with pytest.raises(StudyError) as caught:
        search(study(settings, sampler=Beside))
    message(caught, "{'batch': 77}", "is not a point of the space")
    with pytest.raises(StudyError) as caught:
        search(study(settings, sampler=7))
    message(caught, "sampler", "got 7")
    with pytest.raises(UnknownNameError, match="'exhaustve'"):
        search(study(settings, sampler="exhaustve"))


def test_failing_make_model_ends_the_search(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, message: Messages
) -> None:
    monkeypatch.setattr(
        killed.NoTrials, "run", lambda *_, **__: Outcome("refused", "ValueError: no weights", phase="model")
    )
    with pytest.raises(StudyError) as caught:
        search(study(settings))
    message(caught, "make_model", "\n  ValueError: no weights")
    assert not read_log(settings["log"]).trials


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"world_size": 0}, "got 0"),
        ({"world_size": 2}, "world_size=2 requires mesh="),
        ({"timeout": float("nan")}, "timeout"),
        ({"trials": 0}, "trials"),
        ({"evaluate": None}, "needs batch="),
        ({"memory": "70 GiBs"}, "'70 GiBs'"),
        ({"memory": "1GiB", "predict": False}, "estimates"),
        ({"schedule": "fast"}, "got 'fast'"),
        ({"accelerator": "tpu"}, "'cpu', 'cuda' or None"),
        ({"accelerator": "cuda", "process_memory": "4GiB"}, "memory='4GiB'"),
        ({"options": 3}, "a function of the point"),
        ({"options": {"loss": 3}}, "an argument of the study"),
    ],
)
def test_invalid_arguments_are_refused(wrong: dict[str, Any], word: str, message: Messages) -> None:
    fine = {"make_model": killed.Net, "space": killed.space, "schedule": killed.schedule, "evaluate": killed.evaluate}
    Study(**fine)
    with pytest.raises((StudyError, ArgumentError)) as caught:
        Study(**{**fine, **wrong})
    message(caught, word)


def test_process_memory_is_refused_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = {"make_model": killed.Net, "space": killed.space, "schedule": killed.schedule, "evaluate": killed.evaluate}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(StudyError, match="address space"):
        Study(**fine, process_memory="4GiB")
    for cpu in ({"accelerator": "cpu"}, {"world_size": 2, "mesh": lambda p: {"dp": 2}}):  # there is one GPU
        assert Study(**fine, process_memory="4GiB", **cpu).process_memory_limit == 4 * 2**30


@pytest.mark.ranks
def test_search_ends_if_killed_processes_do_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(job: Any, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        started.append(subprocess.Popen(["sleep", "1000"], env={**os.environ, "TMPDIR": job.directory}))
        return [{"steps": 0}]

    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(trials, "_launched", launch)
    runs = trials.TrialRunner(Study(killed.Net, killed.space, killed.schedule, killed.evaluate))
    output = tmp_path / "output" / "0001.txt"
    assert runs.run("check", {}, None, output=output, timeout=10.0).status == "ok"
    assert started[0].poll() is not None  # it has ended, though its parent is this process, which did not wait for it
    monkeypatch.setattr(trials, "_PATIENCE", 0.0)
    monkeypatch.setattr(psutil.Process, "kill", lambda self: None)  # as if the driver held it
    try:
        with pytest.raises(StudyError, match="did not end"):
            runs.run("check", {}, None, output=output, timeout=10.0)
    finally:
        started[-1].kill()
        started[-1].wait()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        dist.DistBackendError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
        dist.DistBackendError("NCCL error: unhandled cuda error\nLast error:\nFailed to CUDA calloc async 608 bytes"),
    ],
)
def test_failed_allocations_of_a_gpu_are_oom(error: BaseException) -> None:
    assert RaisedError.of(error, "run", 0).status == "oom"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "CUDA error: an illegal memory access was encountered",
        "NCCL error: remote process exited or there was a network error",
    ],
)
def test_other_errors_of_a_gpu_are_crashes(text: str) -> None:
    assert RaisedError.of(RuntimeError(text), "run", 0).status == "crash"


def test_mesh_of_another_size_refuses_its_point(settings: dict[str, Any], message: Messages) -> None:
    result = search(study(settings, world_size=2, mesh=lambda p: {"dp": p["cut"]}))
    assert {trial.point["cut"]: trial.status for trial in result.trials if trial.point["batch"] == 1} == {
        1: "refused",
        2: "ok",
        3: "refused",
    }
    message(result.trials[0].reason, "{'dp': 1}", "world_size=2")


@pytest.mark.parametrize(("error", "launches"), [(LaunchError, 1), (ServerEndedError, 3)])
def test_ranks_are_relaunched_only_if_their_server_ended(
    error: type[LaunchError], launches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def launch(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        calls.append(args)
        if len(calls) < 3:
            raise error("not started")
        return [{"steps": 0}]

    monkeypatch.setattr(trials, "run_ranks", launch)
    runs = trials.TrialRunner(Study(killed.Net, killed.space, killed.schedule, killed.evaluate))
    with pytest.raises(LaunchError) if launches == 1 else contextlib.nullcontext():
        runs.run("check", {}, None, output=tmp_path / "output" / "0001.txt", timeout=10.0)
    assert len(calls) == launches


def options(point: Any) -> Any:
    return {"microbatches": 2, "target": "torch"} if point["cut"] == 1 else {"loss_weight": None}


def test_invalid_options_refuse_their_point(settings: dict[str, Any]) -> None:
    searched = study(settings, options=options)
    trials = search(searched).trials
    refused = [trial for trial in trials if trial.status == "refused"]
    assert [trial.point["cut"] for trial in refused] == [1] * 4
    assert all("options: StudyError: options has 'target'" in trial.reason for trial in refused)
    assert searched.options_of({"cut": 2}) == {"loss_weight": None}
