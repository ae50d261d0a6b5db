"""Approximate steps on two ranks: they hide no mistake elsewhere, and what needs them is not called wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import run_ranks
from tests.messages import Messages

MESH = {"tp": 2}
NAMES = {"up": "left", "down": "right"}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Model(nn.Module):
    """Two pairs, whose first layers are one."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second, self.head = Pair(), nn.LayerNorm(8), Pair(), nn.Linear(8, 6)
        if tied:
            self.second.up.weight = self.first.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.norm(self.first(x))))


class Dropping(Model):
    """Dropout of full tensors at the end."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.head = nn.Sequential(self.head, nn.Dropout(0.5))


class Near(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 1.0001


class Wrong(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 1.001


class NearPair(nn.Module):
    """Other layers than the original's, which the steps after it are made for."""

    def __init__(self, old: Pair) -> None:
        super().__init__()
        self.left, self.right = old.up, old.down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(torch.tanh(self.left(x) * 1.0001))


def near_pair(old: Pair) -> nn.Module:
    return NearPair(old)


def near(old: nn.LayerNorm) -> nn.Module:
    return _like(old, Near(8))


def wrong(old: nn.Linear) -> nn.Module:
    return _like(old, Wrong(8, 6))


def _like(old: nn.Module, new: nn.Module) -> nn.Module:
    new.load_state_dict(old.state_dict())
    return new


def schedule(mesh: dict[str, int] = MESH) -> slapo.Schedule:
    sch = slapo.create_schedule(Model(), mesh=mesh)
    for name in ("first", "second"):
        sch[f"{name}.up"].shard(["weight", "bias"] if name == "first" else "bias", axis=0).sync("backward")
        sch[f"{name}.down"].shard("weight", axis=1).sync("forward")
    return sch


def verified(sch: slapo.Schedule) -> tuple[str, ...]:
    torch.manual_seed(1)
    return slapo.verify(sch, torch.randn(4, 8)).notes


def blamed(sch: slapo.Schedule) -> tuple[str, list[str]]:
    torch.manual_seed(1)
    try:
        slapo.verify(sch, torch.randn(4, 8))
    except slapo.VerifyError as error:
        return str(error), [step.partition("(")[0] for step in error.steps]
    return "", []


def all_cases(mesh: dict[str, int] = MESH) -> dict[str, object]:
    found: dict[str, object] = {}
    right = schedule(mesh)
    right["norm"].replace(near, rtol=1e-2)
    found["right"] = verified(right)
    right["head"].replace(wrong)
    found["wrong"] = blamed(right)
    for tied in (True, False):
        inside = slapo.create_schedule(Model(tied=tied), mesh=mesh)
        names = {f"{old}.{kind}": f"{new}.{kind}" for old, new in NAMES.items() for kind in ("weight", "bias")}
        inside["first"].replace(near_pair, params=names, rtol=1e-2)
        inside["first.left"].shard(["weight", "bias"], axis=0).sync("backward")
        inside["first.right"].shard("weight", axis=1).sync("forward")
        inside["second.up"].shard("bias" if tied else ["weight", "bias"], axis=0).sync("backward")
        inside["second.down"].shard("weight", axis=1).sync("forward")
        found[f"inside, {tied}"] = _notes_or_error(inside)
        inside["head"].replace(wrong)
        found[f"inside, {tied}, wrong"] = blamed(inside)
    sharded = slapo.create_schedule(Model(), mesh=mesh)
    sharded["norm"].replace(near, rtol=1e-2)
    sharded["head"].shard(["weight", "bias"], axis=0).sync("backward").sync("forward")
    found["around"] = _notes_or_error(sharded)
    dropping = slapo.create_schedule(Dropping(), mesh=mesh)
    dropping["second.up"].shard(["weight", "bias"], axis=0)  # its input gradient stays partial
    dropping["second.down"].shard("weight", axis=1).sync("forward")
    dropping["norm"].replace(near, rtol=1.0)
    found["dropping"] = blamed(dropping)
    return found


def _notes_or_error(sch: slapo.Schedule) -> object:
    try:
        return verified(sch)
    except slapo.VerifyError as error:
        return str(error)


def check(found: dict[str, object], size: int, message: Messages) -> None:
    assert found["right"] == found["around"] == ()
    for key, left_out in (("wrong", "#9"), ("inside, False, wrong", "#1, #2, #3, #4, #5")):
        text, steps = found[key]  # type: ignore[misc]
        assert steps == ["#10 replace"], text
        assert f"without {left_out}, because the tolerance" in text
    text, steps = found["dropping"]  # type: ignore[misc]
    assert ("add sch['second.up'].sync('bwd_post', op='all_reduce')" in text) == (size > 1), text
    assert "dropout" not in text
    for key in ("inside, True", "inside, False"):
        (note,) = found[key]  # type: ignore[misc]
        message(note, "(#1 at 'first')", ": #2 tp.shard at 'first.left', #3 tp.sync at 'first.left'")
        # a tie across the replaced module: what is split with it cannot stand without it
        assert note.endswith("'second.down'" if "True" in key and size > 1 else "'first.right'"), note


@pytest.mark.ranks
def test_on_two_ranks_all_ranks_decide_alike(message: Messages) -> None:
    first, second = run_ranks(all_cases, world_size=2, timeout=600)
    check(first, 2, message)
    assert first == second


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.breadth)])
def test_a_declared_mesh_gives_the_same(size: int, message: Messages) -> None:
    check(all_cases({"tp": size}), size, message)
