"""What modules keep beside parameters: ``get_extra_state``, buffers that forwards resize or register."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from tests.messages import Messages
from tests.support.building import Split, sgd


class Annealed(nn.Module):
    """A divisor that no tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += self.training
        return x / (1 + self.seen)

    def get_extra_state(self) -> Any:
        return torch.tensor(self.seen)

    def set_extra_state(self, state: Any) -> None:
        self.seen = int(state)


class Counted(Annealed):
    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "why": ["steps"]}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Unknown:
    """Of a class that ``torch.load(weights_only=True)`` does not read."""


class Opaque(Annealed):
    def get_extra_state(self) -> Any:
        return Unknown()


class Queue(nn.Module):
    """A buffer that grows, of another type than the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, x.detach().float()])
        return x - self.seen.mean(0)


class Doubling(nn.Module):
    """A buffer whose shards, grown, have the shape of the full one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, self.seen])
        return x * self.weight.sum()


class Lazy(nn.Module):
    """A buffer that the first forward registers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros_like(x[0]))
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return x - self.mean


class Unset(Lazy):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = torch.zeros_like(x[0])
        return super().forward(x)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "extra": Annealed,
    "dict": Counted,
    "grows": Queue,
    "lazy": Lazy,
    "unset": Unset,
}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.kept = nn.Linear(4, 4).double(), nn.Linear(4, 1).double(), KINDS[kind]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.kept(self.one(x))).square().mean()


X = torch.arange(12.0, dtype=torch.float64).view(3, 4)


def built(kind: str, *, checkpointed: bool = False, **options: Any) -> Any:
    sch = slapo.create_schedule(Net(kind))
    if checkpointed:
        sch["two"].checkpoint()
    return slapo.build(sch, optimizer=sgd, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(kind: str, checkpointed: bool, tmp_path: Path) -> None:
    plain = Net(kind)
    optimizer = sgd(plain.parameters())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = plain(X)
        loss.backward()
        optimizer.step()
        return loss.detach()

    one, two = built(kind, checkpointed=checkpointed), built(kind, checkpointed=checkpointed)
    assert torch.equal(one.train_step(X).loss, step())
    one.save(tmp_path)
    state, expected = one.state_dict(), plain.state_dict()
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value) if isinstance(value, torch.Tensor) else state[key] == value
    two.load(tmp_path)
    loss = step()
    assert torch.equal(one.train_step(X).loss, loss)
    assert torch.equal(two.train_step(X).loss, loss)
    two.save(tmp_path)  # what it resumed is the state of the next one, too
    assert torch.equal(two.train_step(X).loss, step())
    one.load(tmp_path)
    assert one.state_dict().keys() == expected.keys()


@pytest.mark.parametrize("kind", ["extra", "dict"])
def test_extra_state_goes_through_every_way_in_and_out(kind: str, tmp_path: Path) -> None:
    sch = slapo.create_schedule(Net(kind))
    sch["one"].checkpoint()
    sch.model(X)
    state = slapo.state_dict(sch)
    assert list(state) == list(sch.model.state_dict())
    other = slapo.create_schedule(Net(kind))
    slapo.load_state_dict(other, state)
    engine = built(kind, weights=state)
    assert (other.model.kept.seen, engine.module.kept.seen) == (1, 1)
    engine.save(tmp_path)
    assert built(kind, weights=tmp_path).module.kept.seen == 1
    if kind == "extra":
        slapo.save_pretrained(sch, tmp_path / "plain")
        assert built(kind, weights=tmp_path / "plain").module.kept.seen == 1
    else:
        with pytest.warns(UserWarning, match=r"tensors only: kept\._extra_state"):
            slapo.save_pretrained(sch, tmp_path / "plain")
        assert "kept._extra_state" not in load_file(tmp_path / "plain" / "model.safetensors")
        with pytest.warns(UserWarning, match=r"keep their own: kept\._extra_state"):
            assert built(kind, weights=tmp_path / "plain").module.kept.seen == 0


def test_a_failed_build_gives_back_the_extra_state() -> None:
    sch = slapo.create_schedule(Net("extra"))
    state = {**sch.model.state_dict(), "kept._extra_state": torch.tensor(5)}
    with pytest.raises(slapo.OptimizerError):
        slapo.build(sch, weights=state, optimizer=lambda parameters: None)  # type: ignore[arg-type,return-value]
    assert sch.model.kept.seen == 0
    with pytest.raises(slapo.WeightsError, match=r"unexpected: other\._extra_state"):
        slapo.load_state_dict(sch, {**state, "other._extra_state": torch.tensor(5)})


def test_unsupported_extra_state_warns_at_save(tmp_path: Path) -> None:
    model = Net("extra")
    model.kept = Opaque()
    engine = slapo.build(slapo.create_schedule(model), optimizer=sgd)
    with pytest.warns(UserWarning, match=r"not in the checkpoint.*kept\._extra_state \(Unknown\)"):
        engine.save(tmp_path)


def test_a_buffer_of_another_shape_is_refused_with_the_call_that_takes_it(tmp_path: Path, message: Messages) -> None:
    engine = built("grows")
    engine.train_step(X)
    state = engine.state_dict()
    engine.save(tmp_path)
    fresh = built("grows")
    with pytest.raises(slapo.WeightsError) as refused:
        fresh.load_state_dict(state)
    message(refused, "kept.seen", "engine.load(directory)")
    fresh.module.kept.seen = state["kept.seen"].clone()  # as the hint says
    fresh.load_state_dict(state)
    assert torch.equal(fresh.train_step(X).loss, engine.train_step(X).loss)
    with pytest.raises(slapo.WeightsError, match=r"engine\.load"):
        built("grows", weights=tmp_path)


def test_a_checkpoint_that_does_not_fit_leaves_buffers_as_they_were(tmp_path: Path) -> None:
    engine = built("grows")
    engine.train_step(X)
    engine.save(tmp_path)
    fresh = slapo.build(slapo.create_schedule(Net("grows")), optimizer=torch.optim.AdamW)
    with pytest.raises(slapo.BuildError, match="AdamW"):
        fresh.load(tmp_path)
    assert tuple(fresh.module.kept.seen.shape) == (1, 4)
    assert tuple(fresh.state_dict()["kept.seen"].shape) == (1, 4)


class PerRank(Annealed):
    def get_extra_state(self) -> Any:
        return dist.get_rank()


def over_tp() -> tuple[str, list[str]]:
    """The refusal of a sharded buffer that grew, and the warnings of extra state that differs."""
    sch = slapo.create_schedule(nn.Sequential(Doubling()), mesh={"tp": 2})
    sch["0"].apply(Split(("seen",)))
    assert torch.equal(slapo.state_dict(sch)["0.seen"], torch.zeros(4))
    sch.model(torch.ones(2))
    with pytest.raises(slapo.WeightsError) as refused:
        slapo.state_dict(sch)
    sch = slapo.create_schedule(nn.Sequential(Doubling(), PerRank()), mesh={"tp": 2})
    sch["0"].apply(Split(("weight",)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert slapo.state_dict(sch)["1._extra_state"] == dist.get_rank()
    return str(refused.value), [str(one.message) for one in caught]


@pytest.mark.ranks
def test_extra_state_and_buffers_that_differ_over_tp_are_named(message: Messages) -> None:
    (refused, told), (_, same) = run_ranks(over_tp, world_size=2)
    for warned in (told, same):
        assert any("differs between the ranks of 'tp'" in one and "1._extra_state" in one for one in warned)
    message(refused, "'0.seen' is sharded", "leave the buffer unsharded")


def in_stages(directory: str, kind: str) -> tuple[list[float], dict[str, Any]]:
    """Two steps, saved; the losses of the third, of this and of a resumed engine."""
    engines = []
    for _ in range(2):
        sch = slapo.create_schedule(Net(kind), mesh={"pp": 2}, example_inputs=(X[:1],))
        sch["one"].pipeline_split()
        engines.append(slapo.build(sch, optimizer=sgd, microbatches=3))
    one, two = engines
    one.train_step(X)
    one.train_step(X)
    one.save(directory)
    two.load(directory)
    return [engine.train_step(X).loss.item() for engine in (one, two, one)], one.state_dict()


def all_in_stages(directory: str) -> dict[str, tuple[list[float], dict[str, Any]]]:
    return {kind: in_stages(f"{directory}/{kind}", kind) for kind in ("extra", "grows")}


@pytest.mark.ranks
def test_the_stage_that_runs_a_module_gives_its_state(tmp_path: Path) -> None:
    for results in run_ranks(all_in_stages, str(tmp_path), world_size=2):
        for kind, (losses, state) in results.items():
            assert losses[0] == losses[1] != losses[2], kind
            extra, grown = state.get("kept._extra_state"), state.get("kept.seen")
            assert extra == 12 if grown is None else grown.shape == (13, 4)  # 4 steps of 3 micro-batches
