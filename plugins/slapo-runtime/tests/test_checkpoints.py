"""Checkpoints by step: counted, kept, resumed with what is attached, written while training goes on."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_runtime.checkpoints import SaveOnSignal
from slapo_runtime.checkpoints.manifest import is_complete, step_directories
from slapo_runtime.checkpoints.worker import Staged, Worker
from slapo_runtime.launcher import run_ranks
from tests.messages import Messages
from tests.support.building import adam, batches, real, split
from tests.support.checkpoints import newest, stored

from .test_engine_checkpoint import check, go_on_to_six

FORMER = Path(__file__).parent / "format_1"


def built(mesh: dict[str, int] | None = None, **options: Any) -> Any:
    schedule = slapo.create_schedule(real("mlp", seed=options.pop("seed", 0)).double(), mesh=mesh)
    if mesh is not None:
        split(schedule, "mlp")
    return slapo.build(schedule, **{"optimizer": adam, **options})


def train(engine: Any, count: int = 1) -> None:
    for batch in batches(count):
        engine.train_step({name: value.double() for name, value in batch.items()})


def weights(engine: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = engine.state_dict()
    return found


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- steps ------------------------------------------------------------------------------------------------------


class Sampler:
    def __init__(self, position: Any = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["position"]


def test_later_checkpoints_of_another_training_stay_and_are_named(tmp_path: Path, message: Messages) -> None:
    former, engine = built(), built(seed=1)
    for _ in range(3):
        train(former)
    former.save(tmp_path)
    for _ in range(2):
        train(engine)
        with pytest.warns(UserWarning, match="of another training") as caught:
            engine.save(tmp_path, keep=1)
    message(str(caught[-1].message), "step-00000003", "of a later step than this one (2)")
    assert [one.name for one in step_directories(tmp_path)] == ["step-00000002", "step-00000003"]
    assert equal(stored(tmp_path), weights(former))


def test_steps_are_counted_kept_and_resumed_with_what_is_attached(tmp_path: Path, message: Messages) -> None:
    engine, sampler = built(), Sampler(7)
    engine.attach("sampler", sampler)
    for _ in range(3):
        train(engine)
        sampler.position += 1
        engine.save(tmp_path, keep=2)
    assert [one.name for one in step_directories(tmp_path)] == ["step-00000002", "step-00000003"]
    for directory, steps in ((tmp_path, 3), (tmp_path / "step-00000002", 2)):
        other, own = built(seed=3), Sampler()
        other.attach("sampler", own)
        other.load(directory)
        assert (other.steps, own.position) == (steps, 7 + steps)
    assert equal(stored(tmp_path), weights(engine))
    train(other)
    other.save(tmp_path)
    assert newest(tmp_path).name == "step-00000003"  # a second time
    with pytest.warns(UserWarning, match="not attached") as caught:
        built().load(tmp_path)
    message(caught[0].message, "ignored, not attached to this engine: sampler")
    late = built()
    late.attach("sampler", Sampler())
    late.attach("scaler", Sampler())
    with pytest.warns(UserWarning, match="no state of attached") as caught:
        late.load(tmp_path)
    message(caught[0].message, "they keep theirs: scaler")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda engine: engine.save("runs", keep=0), "keep must be a positive number (got 0)"),
        (lambda engine: engine.attach("sampler", object()), "'sampler' must have state_dict()"),
        (lambda engine: engine.attach("", Sampler()), "the name must be a string (got '')"),
        (lambda engine: [engine.attach("one", Sampler()) for _ in range(2)], "'one' is attached already"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, text: str, message: Messages) -> None:
    with pytest.raises(slapo.ArgumentError) as caught:
        call(built())
    message(caught, text)


def attached_apart(directory: str, position: Any) -> str:
    engine = built({"tp": 2})
    engine.attach("sampler", Sampler(torch.distributed.get_rank() if position == "its rank" else position))
    try:
        engine.save(directory)
    except slapo.SlapoError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.ranks
def test_attached_state_is_json_and_the_same_on_all_ranks(tmp_path: Path, message: Messages) -> None:
    found = run_ranks(attached_apart, str(tmp_path), "its rank", world_size=2)
    assert len(set(found)) == 1
    message(found[0], "RankMismatchError", "'sampler' differs between ranks", "rank 1")
    assert "must be JSON" in run_ranks(attached_apart, str(tmp_path), float("nan"), world_size=2)[0]
    assert not step_directories(tmp_path)


# -- format 1 ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_format_1_goes_on(tmp_path: Path) -> None:
    check(go_on_to_six(None, str(FORMER / "plain")))
    interrupted = tmp_path / "moving"
    shutil.copytree(FORMER / "plain", interrupted / ".checkpoint-complete")
    (interrupted / ".checkpoint-complete" / "model.safetensors").rename(interrupted / "model.safetensors")
    check(go_on_to_six(None, str(interrupted)))


def test_a_newer_step_is_taken_before_format_1_beside_it(tmp_path: Path) -> None:
    directory = shutil.copytree(FORMER / "plain", tmp_path / "runs")
    engine = built(seed=1)
    train(engine)
    engine.save(directory)
    other = built(seed=2)
    other.load(directory)
    assert (other.steps, equal(weights(other), weights(engine))) == (1, True)
    assert equal(weights(built(seed=3, weights=directory)), weights(engine))


def built_from(directory: str) -> dict[str, torch.Tensor]:
    return weights(built({"tp": 2}, seed=3, weights=directory))


@pytest.mark.ranks
def test_ranks_build_from_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    engine = built()
    train(engine)
    engine.save(tmp_path)
    first = {name: one.clone() for name, one in weights(engine).items()}
    train(engine)
    engine.save(tmp_path)
    for state in run_ranks(built_from, str(tmp_path), world_size=2):
        assert equal(state, weights(engine))
    assert equal(weights(built(seed=3, weights=tmp_path / "step-00000001")), first)


@pytest.mark.ranks
def test_ranks_go_on_from_format_1(tmp_path: Path) -> None:
    for state in run_ranks(go_on_to_six, {"tp": 2}, str(FORMER / "plain"), world_size=2):
        check(state)


def test_files_of_two_saves_of_format_1_are_not_mixed(tmp_path: Path, message: Messages) -> None:
    shutil.copytree(FORMER / "plain", tmp_path / "mixed")
    shutil.copy(FORMER / "masters" / "optimizer.safetensors", tmp_path / "mixed")
    engine = built()
    before = weights(engine)
    with pytest.raises(slapo.WeightsError) as caught:
        engine.load(tmp_path / "mixed")
    message(caught, "two different saves", "optimizer.safetensors")
    assert equal(weights(engine), before)


# -- asynchronous -----------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """What changes after the call does not reach the files, and the memory of one save is used by the next."""
    engine = built()
    for steps in (1, 2):
        train(engine)
        before = weights(engine)
        pending = engine.save(tmp_path, asynchronous=True)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.fill_(steps)
            for state in engine.optimizer.state.values():
                state["exp_avg"].fill_(steps)
        worker = engine._state.saving.worker._process.pid
        pending.wait()
        assert pending.done
        assert equal(stored(tmp_path), before)
        assert not any(value.eq(steps).all() for name, value in stored(tmp_path, "optimizer").items() if "avg" in name)
    pending.wait()  # nothing more
    assert engine._state.saving.worker._process.pid == worker
    other = built(seed=4)
    engine.save(tmp_path, asynchronous=True)
    engine.load(tmp_path)  # waits
    other.load(tmp_path)
    assert other.steps == engine.steps == 2


@pytest.mark.slow
def test_the_end_warns_of_an_error_that_no_wait_raised(tmp_path: Path) -> None:
    worker = Worker()
    worker.start(Staged(tmp_path / "removed", 0, "some", None))
    with pytest.warns(UserWarning, match="asynchronous save is not complete: FileNotFoundError"):
        del worker


def failing_on_one_rank(directory: str, asynchronous: bool) -> list[str]:
    engine, found = built({"tp": 2}), []
    train(engine)
    engine.save(directory)
    train(engine)
    if asynchronous:  # the worker is there, and may be kept from writing
        engine.save(f"{directory}/warm", asynchronous=True).wait()
    with refused_writes(asynchronous, engine) if torch.distributed.get_rank() == 1 else nothing():
        try:
            pending = engine.save(directory, asynchronous=asynchronous)
            found.append("returned")
            if pending is not None:
                pending.wait()
        except slapo.BuildError as error:
            found.append(str(error))
    engine.load(directory)
    found.append(str(engine.steps))
    engine.steps = 5
    engine.save(directory, asynchronous=asynchronous)
    engine.load(directory)
    return [*found, str(engine.steps)]


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def refused_writes(asynchronous: bool, engine: Any) -> Iterator[None]:
    """Files of this process, or of its worker, may not grow: as on a full disk."""
    process = engine._state.saving.worker._process.pid if asynchronous else 0
    before = resource.prlimit(process, resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process, resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.ranks
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_costs_no_checkpoint(
    asynchronous: bool, tmp_path: Path, message: Messages
) -> None:
    found = run_ranks(failing_on_one_rank, str(tmp_path), asynchronous, world_size=2)
    for texts in found:
        error, *steps = texts[asynchronous:]
        assert steps == ["1", "5"]
        assert "OSError: [Errno 27] File too large" in error
        message(error, "File too large")
    assert "failed on rank 1" in found[0][asynchronous]
    assert [one.name for one in step_directories(tmp_path)] == ["step-00000001", "step-00000005"]


def save_into(directory: str) -> str:
    engine = built({"tp": 2})
    try:
        engine.save(directory)
    except slapo.BuildError as error:
        return str(error)
    return "saved"


@pytest.mark.ranks
def test_a_directory_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path: Path, message: Messages) -> None:
    (tmp_path / "file").write_text("in the way")
    for text in run_ranks(save_into, str(tmp_path / "file"), world_size=2):
        message(text, "cannot be written")


def test_a_read_only_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = built()
    engine.save(tmp_path)

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "mkdir", refused)  # permissions do not bind the superuser
    engine.steps = 1
    with pytest.raises(slapo.BuildError, match="cannot be written: PermissionError: read-only"):
        engine.save(tmp_path)
    monkeypatch.undo()
    assert newest(tmp_path).name == "step-00000000"


@pytest.mark.ranks
def test_a_worker_that_was_killed_is_an_error_and_replaced(tmp_path: Path, message: Messages) -> None:
    engine = built()
    engine.save(tmp_path, asynchronous=True).wait()
    train(engine)
    os.kill(engine._state.saving.worker._process.pid, signal.SIGSTOP)
    engine.save(tmp_path, asynchronous=True)
    os.kill(engine._state.saving.worker._process.pid, signal.SIGKILL)
    with pytest.raises(slapo.BuildError) as caught:
        engine.save(tmp_path)
    message(caught, "worker process", "exit code -9")
    assert newest(tmp_path).name == "step-00000000"
    engine.save(tmp_path, asynchronous=True).wait()
    assert newest(tmp_path).name == "step-00000001"


# -- signals ----------------------------------------------------------------------------------------------------


def signaled(directory: str) -> tuple[list[int], list[str]]:
    """Signals on the second rank, then on the first; the steps that were saved, and those that were kept."""
    engine, saved = built({"tp": 2}), []
    with SaveOnSignal(engine, directory, signals=[signal.SIGUSR1], keep=1) as on_signal:
        for number in range(5):
            train(engine)
            if (number, torch.distributed.get_rank()) in ((1, 1), (3, 0)):
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGUSR1)
            if on_signal.step_is_over():
                saved.append(engine.steps)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    return saved, [one.name for one in step_directories(Path(directory))]


@pytest.mark.ranks
def test_a_signal_on_one_rank_saves_once_on_all(tmp_path: Path) -> None:
    assert run_ranks(signaled, str(tmp_path), world_size=2) == [([2, 4], ["step-00000004"])] * 2
    assert is_complete(tmp_path / "step-00000004")
