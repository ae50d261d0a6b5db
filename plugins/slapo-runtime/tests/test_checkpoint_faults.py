"""A load that fails on one rank changes nothing on any; an interrupted save leaves the old checkpoint or the new."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from slapo_runtime.weights.checkpoint_source import CheckpointSource
from tests.messages import Messages
from tests.support.building import adam, batches, real, split
from tests.support.checkpoints import newest

MESHES: dict[int, dict[str, int] | None] = {1: None, 2: {"tp": 2}}


def engine_on(world_size: int) -> Any:
    schedule = slapo.create_schedule(real("mlp"), mesh=MESHES[world_size])
    if world_size > 1:
        split(schedule, "mlp")
    return slapo.build(schedule, optimizer=adam)


def train(engine: Any, count: int) -> None:
    for batch in batches(count):
        engine.train_step(batch)


def own_state(engine: Any) -> list[Any]:
    """Everything that loading would change, of this rank."""
    states = [engine.optimizer.state[parameter] for parameter in engine.module.parameters()]
    moments = [state[key] for state in states for key in sorted(state)]
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    return [tensor.detach().clone() for tensor in (*engine.module.parameters(), *moments)] + rates


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(a, b, strict=True)
    )


@contextmanager
def reading_fails_at(broken: str) -> Iterator[None]:
    fill = CheckpointSource.fill

    def failing(self: Any, name: str, *args: Any) -> None:
        if name == broken:
            raise OSError(f"the disk is gone at {name}")
        fill(self, name, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointSource, "fill", failing)
        yield


@contextmanager
def truncated(directory: str) -> Iterator[None]:
    file = newest(Path(directory)) / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    try:
        yield
    finally:
        file.write_bytes(content)


@contextmanager
def optimizer_refuses(engine: Any) -> Iterator[None]:
    load = engine.optimizer.load_state_dict

    def halfway(state: Any) -> None:
        load(state)
        raise RuntimeError("not this state")

    engine.optimizer.load_state_dict = halfway
    try:
        yield
    finally:
        del engine.optimizer.load_state_dict


def load_with_faults(directory: str, world_size: int, faulty_rank: int) -> list[str]:
    engine = engine_on(world_size)
    train(engine, 1)
    before = own_state(engine)
    is_faulty = world_size == 1 or torch.distributed.get_rank() == faulty_rank
    found = []
    moments = ("fc1.bias::exp_avg", "fc2.weight::step")
    faults: list[Callable[[], Any]] = [lambda name=name: reading_fails_at(name) for name in moments]
    faults += [lambda: optimizer_refuses(engine), lambda: reading_fails_at("fc2.weight")]
    for fault in faults:
        try:
            if is_faulty:
                with fault():
                    engine.load(directory)
            else:
                engine.load(directory)
            found.append("loaded")
        except Exception as error:  # noqa: BLE001 - any; it is compared below
            found.append(f"{type(error).__name__}: {error}")
        if not same(own_state(engine), before):
            found.append("changed")
    before = own_state(engine)
    state = {key: tensor + 1 for key, tensor in engine.state_dict().items()}
    if is_faulty:
        del state["fc2.weight"]
    try:
        engine.load_state_dict(state)
    except slapo.BuildError as error:
        found.append(f"{type(error).__name__}: {error.message}")
    if not same(own_state(engine), before):
        found.append("changed")
    train(engine, 1)
    before = own_state(engine)
    engine.load(directory)
    if same(own_state(engine), before):
        found.append("not loaded")
    return found


FAULTS = [
    "OSError: the disk is gone at fc1.bias::exp_avg",
    "OSError: the disk is gone at fc2.weight::step",
    "RuntimeError: not this state",
    "WeightsError: the checkpoint 'TMP/step-00000003' was loaded in part, because reading it failed: the disk is gone "
    "at fc2.weight\n  hint: engine.load(directory) of a complete checkpoint, before the next step",
]


def test_a_load_that_fails_anywhere_changes_nothing_or_says_so(tmp_path: Path, message: Messages) -> None:
    engine = engine_on(1)
    train(engine, 3)
    engine.save(tmp_path)
    *faults, changed, missing = load_with_faults(str(tmp_path), 1, 0)
    assert [fault.replace(str(tmp_path), "TMP") for fault in faults] == FAULTS
    assert changed == "changed"
    message(missing, "WeightsError", "missing: fc2.weight (4, 8)")


@pytest.mark.ranks
@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_a_load_that_fails_on_one_rank_fails_on_all(tmp_path: Path, faulty_rank: int, message: Messages) -> None:
    engine = engine_on(1)
    train(engine, 3)
    engine.save(tmp_path)
    found = run_ranks(load_with_faults, str(tmp_path), 2, faulty_rank, world_size=2)
    *faults, changed, missing = (text.replace(str(tmp_path), "TMP") for text in found[faulty_rank])
    assert faults == FAULTS
    assert changed == "changed"
    assert missing.startswith("WeightsError: ")
    assert missing.endswith("  - missing: fc2.weight (4, 8)")
    others = [text for text in found[1 - faulty_rank] if text != "changed"]
    for text, fault in zip(others, [*faults, missing], strict=True):
        assert text.startswith("BuildError: ")
        message(text, f" failed on rank {faulty_rank}: {fault.partition(chr(10) + '  hint')[0]}")


def load_with_a_truncated_file(directory: str) -> tuple[str, bool]:
    engine = engine_on(2)
    train(engine, 1)
    before = own_state(engine)
    try:
        engine.load(directory)
    except slapo.BuildError as error:
        return f"{type(error).__name__}: {error.message}", same(own_state(engine), before)
    return "loaded", False


@pytest.mark.ranks
def test_a_truncated_file_is_refused_on_every_rank_before_anything_changes(tmp_path: Path) -> None:
    engine = engine_on(1)
    engine.save(tmp_path)
    with truncated(str(tmp_path)):
        for text, unchanged in run_ranks(load_with_a_truncated_file, str(tmp_path), world_size=2):
            assert "__0_0.distcp is damaged: it holds " in text
            assert unchanged


@contextmanager
def recorded(directory: Path, into: Path) -> Iterator[list[Path]]:
    """A copy of ``directory`` as it is before each operation on a file in it: what a crash there would leave."""
    into.mkdir()
    states: list[Path] = []
    active = [True]

    def look(event: str, args: tuple[Any, ...]) -> None:
        if not active[0] or event not in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open", "shutil.rmtree"):
            return
        if not any(str(directory) in str(arg) for arg in args):
            return
        active[0] = False
        states.append(into / str(len(states)))
        if directory.exists():
            shutil.copytree(directory, states[-1])
        else:
            states[-1].mkdir()
        active[0] = True

    sys.addaudithook(look)  # it stays for the life of the process
    try:
        yield states
    finally:
        active[0] = False


@pytest.mark.parametrize("before", ["nothing", "an older step", "the same step"])
def test_a_save_interrupted_anywhere_leaves_the_checkpoint_before_or_the_new_one(tmp_path: Path, before: str) -> None:
    place, probe = tmp_path / "run", engine_on(1)
    engine = engine_on(1)
    train(engine, 1)
    if before != "nothing":
        engine.save(place)
        (place / "notes.txt").write_text("the user's own")
    old = own_state(engine)
    train(engine, 2)
    if before == "the same step":
        engine.steps = 1
    with recorded(place, tmp_path / "states") as states:
        engine.save(place, keep=1)
    new = own_state(engine)
    states.append(place)
    assert len(states) > 8
    outcomes = []
    for state in states:
        try:
            probe.load(state)
        except slapo.WeightsError as error:
            outcomes.append("none" if f"'{state}' is not a checkpoint" in error.message else error.message)
            continue
        outcomes.append("old" if same(own_state(probe), old) else "new" if same(own_state(probe), new) else "mixed")
        weights = slapo.build(slapo.create_schedule(real("mlp", seed=3)), weights=state).state_dict()
        assert any(
            all(torch.equal(weights[name], one) for name, one in zip(weights, values, strict=False))
            for values in (old, new)
        )
    earlier = "none" if before == "nothing" else "old"
    turn = outcomes.index("new")
    assert outcomes == [earlier] * turn + ["new"] * (len(states) - turn)
    assert 3 < turn < len(states) - 2  # a crash after the manifest was among them
    for state in states:  # and the next save is whole again, and leaves nothing behind
        engine.save(state, keep=1)
        probe.load(state)
        assert same(own_state(probe), new)
        kept = [] if before == "nothing" else ["notes.txt"]
        assert sorted(file.name for file in state.iterdir()) == [*kept, f"step-{engine.steps:08d}"]
        assert sorted(file.name for file in newest(state).iterdir()) == [".metadata", "__0_0.distcp", "checkpoint.json"]
