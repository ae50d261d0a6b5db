"""A schedule is accepted or refused alike at every world size: layouts, hooks and forwards are state at size 1 too."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from tests.messages import Messages
from tests.tiers import sampled


class Block(nn.Module):
    """Two layers that share nothing, and an embedding; all sizes divide by 4."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.up.heads = 4

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.embed(ids))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.block(ids)


def _fresh(old: Any) -> nn.Module:
    """A module of the present sizes."""
    if isinstance(old, nn.Embedding):
        return nn.Embedding(old.num_embeddings, old.embedding_dim)
    return nn.Linear(old.in_features, old.out_features)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


Step = Callable[[slapo.Schedule], Any]

STEPS: dict[str, Step] = {
    "shard(weight, 0)": lambda sch: sch["block.up"].shard("weight", axis=0),
    "shard(weight, 1)": lambda sch: sch["block.up"].shard("weight", axis=1),
    "shard(bias)": lambda sch: sch["block.up"].shard("bias", axis=0),
    "shard(both)": lambda sch: sch["block.up"].shard(["weight", "bias"], axis=0),
    "sync(all_reduce)": lambda sch: sch["block.up"].sync("fwd_post", "all_reduce"),
    "sync(all_gather)": lambda sch: sch["block.up"].sync("fwd_post", "all_gather"),
    "sync(forward)": lambda sch: sch["block.up"].sync("forward"),
    "sync(backward)": lambda sch: sch["block.up"].sync("backward"),
    "sync above": lambda sch: sch["block"].sync("fwd_post", "all_reduce"),
    "sync_gradient": lambda sch: sch["block.up"].sync_gradient("bias"),
    "fork_rng": lambda sch: sch["block.up"].fork_rng(),
    "shard_attribute": lambda sch: sch["block.up"].shard_attribute("heads"),
    "checkpoint": lambda sch: sch["block.up"].checkpoint(),
    "checkpoint above": lambda sch: sch["block"].checkpoint(),
    "replace, weights dropped": lambda sch: sch["block.up"].replace(nn.Linear(8, 16), drop=["weight", "bias"]),
    "replace, weights taken": lambda sch: sch["block.up"].replace(_fresh),
    "replace, fixed sizes": lambda sch: sch["block.up"].replace(nn.Linear(8, 16)),
    "wrap": lambda sch: sch["block.up"].replace(Wrapped),
    "replace above": lambda sch: sch["block"].replace(lambda old: Block()),
    "shard rows": lambda sch: sch["block.embed"].shard("weight", axis=0),
    "replace rows": lambda sch: sch["block.embed"].replace(_fresh),
    "undo": lambda sch: sch.undo(),
}


def outcome(names: tuple[str, ...], size: int) -> tuple[str, ...]:
    """What each step of a sequence comes to on a declared mesh of ``size`` ranks."""
    sch = slapo.create_schedule(Blocks(), mesh={"tp": size})
    found = []
    for name in names:
        try:
            STEPS[name](sch)
        except slapo.SlapoError as error:
            found.append(type(error).__name__)
        else:
            found.append("accepted")
    return tuple(found)


def differing(sequences: Any, sizes: tuple[int, ...]) -> list[str]:
    found = []
    for names in sequences:
        first, *others = [outcome(names, size) for size in sizes]
        found += [f"{names}: {first} on one rank, {other} on more" for other in others if other != first]
    return found


def test_every_pair_of_steps_is_judged_alike_at_every_world_size() -> None:
    assert differing(itertools.product(STEPS, repeat=2), (1, *sampled((2, 4)))) == []


FURTHER = [pytest.param(name, marks=pytest.mark.breadth) for name in ("shard(weight, 1)", "shard(both)", "shard rows")]


@pytest.mark.breadth
@pytest.mark.parametrize("first", ["shard(weight, 0)", *FURTHER])
def test_obligations_are_equal_at_every_world_size(first: str) -> None:
    assert differing(((first, *rest) for rest in itertools.product(STEPS, repeat=2)), (1, 2)) == []


@pytest.mark.parametrize("size", [1, 2])
def test_a_new_module_may_be_split_again(size: int) -> None:
    sch = slapo.create_schedule(Blocks(), mesh={"tp": size})
    sch["block.up"].shard("weight", axis=0)
    sch["block.up"].replace(nn.Linear(8, 16), drop=["weight", "bias"])
    assert sch["block.up"].layout("weight").placements == ()
    sch["block.up"].shard("weight", axis=0)
    assert sch["block.up"].layout("weight").shards() == (("tp", 0),)


@pytest.mark.parametrize("size", [1, 2])
def test_sync_of_an_unsharded_replacement_is_refused(size: int, message: Messages) -> None:
    """It would add up the whole output once for every rank."""
    sch = slapo.create_schedule(Blocks(), mesh={"tp": size})
    sch["block.up"].shard("weight", axis=0)
    sch["block.up"].replace(nn.Linear(8, 16), drop=["weight", "bias"])
    with pytest.raises(slapo.PreconditionError) as caught:
        sch["block.up"].sync("fwd_post", "all_reduce")
    message(caught, "at 'block.up': nothing was split", "not a partial sum")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("sync", [("forward",), ("backward",), ("fwd_post", None)], ids=lambda sync: sync[0])
def test_replace_with_an_unsharded_module_is_refused_while_synced(
    size: int, sync: tuple[Any, ...], message: Messages
) -> None:
    """``replace`` carries hooks over: the whole output would be added up once for every rank."""
    sync = sync if sync[-1] is not None else ("fwd_post", _unchanged)
    sch = slapo.create_schedule(Blocks(), mesh={"tp": size})
    sch["block.up"].shard(["weight", "bias"], axis=0).sync(*sync)
    new, record = nn.Linear(8, 16), sch.records[-1]
    with pytest.raises(slapo.PreconditionError) as caught:
        sch["block.up"].replace(new, drop=["weight", "bias"])
    message(caught, "cannot apply replace(", ": it drops 'weight' and 'bias'", str(record), "replace first")
    sch.undo()
    sch["block.up"].replace(new, drop=["weight", "bias"]).shard(["weight", "bias"], axis=0).sync(*sync)


@pytest.mark.parametrize("size", [1, 2])
def test_replace_with_an_unsharded_block_is_refused_while_synced(size: int, message: Messages) -> None:
    sch = slapo.create_schedule(Blocks(), mesh={"tp": size})
    sch["block.up"].shard(["weight", "bias"], axis=0)
    sch["block"].sync("backward")
    names = ["embed.weight", "up.weight", "up.bias", "down.weight", "down.bias"]
    with pytest.raises(slapo.PreconditionError) as caught:
        sch["block"].replace(lambda old: Block(), drop=names)
    message(caught, ": it drops 'up.weight' and 'up.bias'", "#2 sync('backward') at 'block'", "replace first")


def _unchanged(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    return output


def test_one_rank_costs_nothing() -> None:
    """No hook, no forward and no other tensor: only the schedule knows of the split."""
    model = Blocks()
    up, weight, before = model.block.up, model.block.up.weight, dict(model.block.up.__dict__)
    sch = slapo.create_schedule(model, mesh={"tp": 1})
    sch["block.up"].shard("weight", axis=1).sync("forward")
    sch["block.down"].shard(["weight", "bias"], axis=0).sync("backward")
    sch["block.embed"].shard("weight", axis=0).sync("forward")
    assert up.weight is weight
    changed = {key for key, value in up.__dict__.items() if before.get(key) is not value}
    assert changed <= {"_slapo_steps"}  # a mark, by which a copy of the model is known to be scheduled
    assert "forward" not in up.__dict__
    assert not up._forward_hooks
    assert not up._forward_pre_hooks
    assert sch["block.up"].layout("weight").shards() == (("tp", 1),)
    sch.undo(to=0)
    assert sch["block.up"].layout("weight").placements == ()


@dataclasses.dataclass(frozen=True)
class Looks(slapo.Primitive):
    name = "acme.looks"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.add_hook(node, "forward", _unchanged)


def test_another_hook_is_not_a_collective_that_would_go_on() -> None:
    sch = slapo.create_schedule(Blocks(), mesh={"tp": 2})
    sch["block.up"].shard(["weight", "bias"], axis=0).sync("forward")
    sch["block.up"].replace(lambda old: nn.Sequential(old)).apply(Looks())  # the collective stays with the layer inside
    with pytest.raises(slapo.PreconditionError) as refused:
        sch["block.up"].replace(nn.Sequential(nn.Linear(8, 16)), drop=["0.weight", "0.bias"])
    assert ["set by a step at another module)" in each.message for each in refused.value.violations] == [True]
