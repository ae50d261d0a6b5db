"""A runtime that keeps weights and moments elsewhere: core reads, compares, saves and loads where it keeps them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import slapo_core as slapo
from slapo_runtime.checkpoints.manifest import newest_checkpoint
from slapo_runtime.launcher import run_ranks
from slapo_runtime.weights.checkpoint_source import CheckpointSource
from slapo_runtime.weights.optimizer_state import OptimizerState
from tests.messages import Messages
from tests.support.checkpoints import described, stored
from tests.support.staged import batch, chain, scheduled

from .sliced_runtime import Slices, sliced

MESH = {"dp": 2, "tp": 2}
CLOSE = 3e-6


def adamw(parameters: Any) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, eps=1e-4)


def engine_on(target: str, mesh: dict[str, int] | None = None, seed: int = 0) -> Any:
    sch = scheduled(mesh, model=chain(seed).float())
    return slapo.build(sch, target=target, **({"optimizer": adamw} if target == "torch" else {}))


def train(engine: Any, first: int, last: int) -> dict[str, torch.Tensor]:
    mesh = engine._state.mesh
    replicas, place = (mesh.size("dp"), mesh.rank("dp")) if mesh is not None else (1, 0)
    for number in range(first, last):
        engine.train_step({name: value.chunk(replicas)[place] for name, value in batch(number).items()})
    return engine.state_dict()


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert list(one) == list(other)
    return [name for name in one if not torch.allclose(one[name].double(), other[name].double(), rtol=0, atol=CLOSE)]


def said(function: Any, *args: Any, **kwargs: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            function(*args, **kwargs)
        except (slapo.SlapoError, OSError) as error:
            return f"{type(error).__name__}: {error}"
    return "\n".join(str(one.message) for one in caught) or "fine"


@pytest.fixture(autouse=True)
def targets() -> Iterator[None]:
    with sliced():
        yield


# -- one process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sliced", "forgetting"])
def test_masters_are_saved_beside_the_models_own_types_and_loaded(target: str, tmp_path: Path) -> None:
    engine = engine_on(target)
    train(engine, 0, 2)
    before = {key: master.detach().clone() for key, master in enumerate(engine.slices.masters.values())}
    engine.save(tmp_path)
    assert {value.dtype for value in engine.state_dict().values()} == {torch.float32}
    types = {name: value.dtype for name, value in stored(tmp_path).items()}
    assert types.pop("frozen") == torch.float32
    assert {*types.values()} == {torch.float32, torch.float64}  # buffers, and masters
    assert types["embed.weight"] == torch.float64
    wanted = train(engine, 2, 4)

    other = engine_on(target, seed=5)
    train(other, 0, 1)
    other.load(tmp_path)
    loaded = dict(enumerate(other.slices.masters.values()))
    assert all(torch.equal(loaded[key], value) for key, value in before.items()), "rounded on the way"
    assert all(torch.equal(value, wanted[name]) for name, value in train(other, 2, 4).items())


@pytest.mark.parametrize("target", ["sliced", "forgetting"])
def test_masters_of_format_1_are_loaded_in_their_type(target: str) -> None:
    directory = Path(__file__).parent / "format_1" / "masters"
    wider = load_file(directory / "trained.safetensors")
    engine = engine_on(target, seed=5)
    train(engine, 0, 1)
    engine.load(directory)
    for name, parameter in engine.module.named_parameters():
        if name in wider:
            master = engine.slices.full(engine.slices.masters[id(parameter)], tuple(wider[name].shape))
            assert torch.equal(master, wider[name]), name
    assert (engine.ticks, len(wider)) == (2, len(engine.slices.masters))
    assert far(train(engine, 2, 4), train(engine_on(target), 0, 4)) == []


def test_target_without_main_weights_reads_the_checkpoint(tmp_path: Path, message: Messages) -> None:
    engine = engine_on("sliced")
    train(engine, 0, 2)
    engine.save(tmp_path)
    plain = engine_on("torch", seed=5)
    message(said(plain.load, tmp_path), "unknown to this engine: clock")
    assert far(train(plain, 2, 4), train(engine, 2, 4)) == []
    plain.save(tmp_path)
    assert described(tmp_path)["runtime"] == {}
    again = engine_on("forgetting", seed=6)
    assert said(again.load, tmp_path) == "fine"
    assert far(train(again, 4, 6), train(plain, 4, 6)) == []


def test_runtime_state_is_saved_as_data_and_loaded(tmp_path: Path) -> None:
    engine = engine_on("sliced")
    train(engine, 0, 3)
    engine.save(tmp_path)
    other = engine_on("sliced")
    other.load(tmp_path)
    assert other.ticks == 3
    assert other._state.load(tmp_path, uses=("clock",)) == {"clock": {"ticks": 3}, "counters": {"steps": 3}}
    for wrong in ({"clock": torch.ones(1)}, {"clock": float("nan")}):
        text = said(engine._state.save, tmp_path / "new", optimizer=engine.slices, runtime=wrong)
        assert text.startswith("BuildError: ")
        assert "must be JSON" in text
    assert not (tmp_path / "new").exists()


@contextmanager
def reading_fails_at(broken: str) -> Iterator[None]:
    read = CheckpointSource.read

    def failing(self: Any, name: str, *rest: Any) -> torch.Tensor:
        if name == broken:
            raise OSError("the disk is gone")
        return read(self, name, *rest)

    with mock.patch.object(CheckpointSource, "read", failing):
        yield


def test_a_load_that_fails_changes_nothing_or_says_so(tmp_path: Path) -> None:
    engine = engine_on("forgetting")
    train(engine, 0, 2)
    engine.save(tmp_path)
    other = engine_on("forgetting", seed=5)
    before = train(other, 0, 1)
    with reading_fails_at("blocks.3.down.weight::exp_avg_sq"):
        assert said(other.load, tmp_path) == "OSError: the disk is gone"
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    moments = [state["exp_avg"].clone() for state in other.slices.inner.state.values()]
    with reading_fails_at("blocks.3.down.weight"):
        assert "was loaded in part" in said(other.load, tmp_path)
    other.load(tmp_path)
    loaded = [state["exp_avg"] for state in other.slices.inner.state.values()]
    assert not any(torch.equal(one, two) for one, two in zip(moments, loaded, strict=True))


def test_parameters_that_differ_from_main_weights_are_named(tmp_path: Path) -> None:
    engine = engine_on("sliced")
    before = train(engine, 0, 1)
    with torch.no_grad():
        engine.module.blocks[1].up.weight.add_(1)
    text = said(engine.save, tmp_path)
    assert text.startswith("RankMismatchError: 'blocks.1.up.weight' no longer matches ")
    assert "engine.load_state_dict(state)" in text
    assert newest_checkpoint(tmp_path) is None
    assert "restored from the main copies" in said(engine.check_replicas, repair=True)
    assert said(engine.check_replicas) == "fine"
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    with torch.no_grad():
        state = {name: value + 1 for name, value in engine.state_dict().items()}
    engine.load_state_dict(state)
    assert said(engine.check_replicas) == "fine"
    assert far(engine.state_dict(), state) == []


def test_an_optimizer_that_keeps_state_of_foreign_tensors_is_not_saved(tmp_path: Path, message: Messages) -> None:
    engine = engine_on("torch")
    engine.optimizer.state[torch.ones(2)]["moment"] = torch.ones(2)
    message(said(engine.save, tmp_path), "BuildError", "1 tensors")


# -- ranks ----------------------------------------------------------------------------------------------------------


def corrupt(engine: Any, name: str, key: str, rank: int) -> None:
    parameter = engine.module.get_parameter(name)
    with torch.no_grad():
        if dist.get_rank() == rank:
            if key == "forward":
                parameter.data.add_(1)
            elif key:
                engine.slices.inner.state[engine.slices.masters[id(parameter)]][key].add_(1)
            else:
                engine.slices.masters[id(parameter)].data.add_(1)


CORRUPTED = {
    ("sliced", "blocks.0.norm.weight", ""): ("' no longer matches ", " on rank 3"),
    ("sliced", "blocks.0.norm.weight", "exp_avg"): ("::exp_avg' differ",),
    ("sliced", "blocks.0.norm.weight", "step"): ("::step' differ",),
    ("sliced", "blocks.0.up.weight", "forward"): ("' no longer matches ",),
    ("forgetting", "blocks.0.norm.weight", ""): ("' differ",),
}
"""What is changed on the last rank, and how it is named. A slice of a piece of its own has no copy anywhere."""


def on_ranks(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with sliced():
        for target in ("sliced", "forgetting"):
            engine = engine_on(target, MESH)
            state = train(engine, 0, 2)
            engine.slices.most_alive = 0
            engine.save(directory / target)
            kept = engine._state.full_state(rank0_only=True, include_added=True)
            moments = OptimizerState(engine._state, engine.slices).gather(wanted=dist.get_rank() == 0)
            other = engine_on(target, MESH, seed=5)
            other.load(directory / target)
            other.check_replicas()
            found[target] = {
                "state": state,
                "most at once": engine.slices.most_alive,
                "kept": (len(kept), len(moments)),
                "resumed": train(other, 2, 4),
                "from torch": None,
            }
            other.load(directory / "plain")
            found[target]["from torch"] = train(other, 2, 4)
        for target, name, key in CORRUPTED:
            engine = engine_on(target, MESH)
            train(engine, 0, 1)
            corrupt(engine, name, key, rank=3)
            texts = [said(engine.check_replicas), said(engine.save, directory / "no")]
            texts += [said(engine.check_replicas, repair=True), said(engine.check_replicas)]
            found[f"{target} {name} {key}"] = texts
    return found


@pytest.mark.breadth
@pytest.mark.ranks
def test_slices_over_replicas_of_a_split_model(tmp_path: Path) -> None:
    plain = engine_on("torch")
    two = train(plain, 0, 2)
    plain.save(tmp_path / "plain")
    four = train(plain, 2, 4)
    ranks = run_ranks(on_ranks, tmp_path, world_size=4, timeout=600)
    for rank, found in enumerate(ranks):
        for target in ("sliced", "forgetting"):
            one = found[target]
            assert {name: value.dtype for name, value in one["state"].items()} == dict.fromkeys(two, torch.float32)
            assert far(one["state"], two) == far(one["resumed"], four) == far(one["from torch"], four) == []
            assert one["most at once"] <= 2, "tensors are gathered one at a time"
            assert (one["kept"] == (0, 0)) == (rank > 0), "only the rank that writes keeps what is gathered"
        for (target, name, key), (named, *more) in CORRUPTED.items():
            checked, saved, repaired, again = found[f"{target} {name} {key}"]
            assert f"'{name}{named}" in checked, checked
            assert f"'{name}{named}" in saved
            assert all(word in checked and word in saved for word in more)
            assert repaired != "fine"
            assert again == "fine", again
    assert newest_checkpoint(tmp_path / "no") is not None, "with the values of the first rank"
    for target in ("sliced", "forgetting"):
        other = engine_on("torch", seed=5)
        with pytest.warns(UserWarning, match="clock"):
            other.load(tmp_path / target)
        assert far(train(other, 2, 4), four) == []


def test_slices_end_where_the_padding_begins() -> None:
    """The runtime of these tests is right itself: two replicas' slices of five elements are whole again."""
    slices = Slices.__new__(Slices)
    slices.replicas, pieces = 2, []
    for slices.place in (0, 1):
        pieces.append(slices.slice_of(torch.arange(5.0)))
    assert torch.equal(torch.cat(pieces)[:5], torch.arange(5.0))
