"""Inputs of ``sync`` in containers, which the module may fill or change, and in objects that it cannot look into."""

from __future__ import annotations

import dataclasses
from collections import UserDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo_core as slapo
from slapo_core.errors import InputError
from slapo_testing import run_ranks
from tests.messages import Messages

from .checks import rand, same_as_untouched

pytestmark = pytest.mark.ranks


class Pair(NamedTuple):
    hidden: Tensor
    scale: float


class Own(dict[str, Any]):
    pass


@dataclasses.dataclass
class State:
    hidden: Tensor


class Block(nn.Module):
    """Take its input out of a container and leave terms, its input and its output there."""

    def __init__(self, take: Callable[..., Any], leave: Callable[..., Any]) -> None:
        super().__init__()
        self.up, self.down, self.take, self.leave = nn.Linear(6, 8), nn.Linear(8, 6), take, leave

    def forward(self, given: Any, *, more: Any = None) -> Tensor:
        hidden = self.take(given)
        out = self.down(torch.tanh(self.up(hidden)))
        self.leave(given, more, hidden, out)
        return out


class Net(nn.Module):
    """Two blocks on one container, all of which the loss reads after them."""

    def __init__(self, make: Callable[[Tensor], Any], take: Any, leave: Any, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.make, self.read = nn.Linear(6, 6), make, read
        self.blocks = nn.ModuleList(Block(take, leave) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        given = self.make(x)
        more: dict[str, list[Tensor]] = {"inputs": []}
        for block in self.blocks:
            x = x + block(given, more=more)
        return x + self.read(given) + sum(each.sin() for each in more["inputs"])


def split_blocks(sch: slapo.Schedule) -> None:
    for block in sch["blocks.*"]:
        block["up"].shard(["weight", "bias"], axis=0)
        block["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        block.sync("bwd_post", "all_reduce")


def in_list(given: Any, more: Any, hidden: Tensor, out: Tensor) -> None:
    given.insert(1, out)
    given.append(out.square())
    more["inputs"].append(hidden)


def in_mapping(given: Any, more: Any, hidden: Tensor, out: Tensor) -> None:
    given["terms"] = (*given.get("terms", ()), out.square(), hidden)
    given["hidden"] = out
    more["inputs"].append(hidden)


def nothing(*_: Any) -> None:
    pass


def of_list(given: Any) -> Tensor:
    return sum(each.cos() for each in given)


def of_mapping(given: Any) -> Tensor:
    return given["hidden"].cos() + sum(each.cos() for each in given["terms"])


CASES: dict[str, tuple[Any, ...]] = {
    "list": (lambda x: [x], lambda given: given[0], in_list, of_list),
    "subclass of dict": (lambda x: Own(hidden=x), lambda given: given["hidden"], in_mapping, of_mapping),
    "UserDict": (lambda x: UserDict(hidden=x), lambda given: given["hidden"], in_mapping, of_mapping),
    "nested": (
        lambda x: ({"in": defaultdict(list, hidden=[x])},),
        lambda given: given[0]["in"]["hidden"][-1],
        lambda given, more, hidden, out: given[0]["in"]["hidden"].append(out),
        lambda given: of_list(given[0]["in"]["hidden"]),
    ),
    "namedtuple": (lambda x: Pair(x, 2.0), lambda given: given.hidden * given.scale, nothing, lambda given: given[0]),
}


def check_containers() -> tuple[str, ...]:
    for name, case in CASES.items():
        try:
            same_as_untouched(lambda case=case: Net(*case), split_blocks, (rand(3, 6),))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error

    def checkpointed(sch: slapo.Schedule) -> None:
        split_blocks(sch)
        sch["blocks.*"].checkpoint()

    same_as_untouched(lambda: Net(*CASES["list"]), checkpointed, (rand(3, 6),))
    texts = []
    for given, steps in (
        (lambda x: State(x), {"mode": "bwd_post", "op": "all_reduce"}),
        (lambda x: [State(x)], {"mode": "bwd_post", "op": "all_reduce", "inputs": ("given",)}),
        (lambda x: State(x), {"mode": "fwd_pre", "op": "all_gather", "axis": 0}),
    ):
        block = Block(lambda given: (given[0] if isinstance(given, list) else given).hidden, nothing)
        sch = slapo.create_schedule(block, mesh={"tp": dist.get_world_size()})
        sch["up"].shard(["weight", "bias"], axis=0)
        sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        sch.root.sync(**steps)
        with pytest.raises(InputError) as refused:
            sch.model(given(torch.randn(3, 6, requires_grad=True)))
        texts.append(str(refused.value))
        if steps["mode"] == "bwd_post":
            sch.model(given(torch.randn(3, 6)))  # nothing needs a gradient
        assert not block._forward_hooks
    given_state = Net(lambda x: State(x), lambda given: given.hidden, nothing, lambda given: given.hidden).double()
    sch = slapo.create_schedule(given_state, mesh={"tp": dist.get_world_size()})
    split_blocks(sch)
    with pytest.raises(InputError, match=r"tp\.sync at 'blocks\.0'"):  # and no search for the step to blame
        slapo.verify(sch, rand(3, 6))
    return tuple(texts)


def test_containers_reach_the_module_unchanged_and_objects_are_refused(
    message: Messages,
) -> None:
    (texts,) = set(run_ranks(check_containers, world_size=2))
    for text, name in zip(texts, ("input 0", "input 'given'", "input 0"), strict=True):
        message(text, name, "is a State", "'hidden' (3, 6)", "give the module the tensors")
