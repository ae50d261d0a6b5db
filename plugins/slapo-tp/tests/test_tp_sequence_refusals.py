"""Sequence parallelism written one module too early or too late is refused, and what is right is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import slapo_core as slapo
from slapo_runtime.ranks.consistency import obligations
from tests.messages import Messages

MESHES = pytest.mark.parametrize("size", [1, 2], ids=["one rank", "two ranks"])
Act = Callable[[Any], object]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(self.norm(hidden)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def inside(sch: Any, *, but: str = "") -> None:
    """Every layer on pieces of the sequence; how they enter and leave is left open."""
    for layer in sch["layers.*"]:
        layer["up"].shard(["weight", "bias"], axis=0).sync("fwd_pre", "all_gather", axis=1)
        layer["down"].shard("weight", axis=1)
        if layer.path != but:
            layer["down"].sync("fwd_post", "reduce_scatter", axis=1)
        layer["norm"].sync_gradient(["weight", "bias"])


def entered(sch: Any) -> None:
    inside(sch)
    sch["words"].shard("weight", axis=0).sync("fwd_post", "reduce_scatter", axis=1)


def left(sch: Any) -> None:
    entered(sch)
    sch["layers.1"].sync("fwd_post", "all_gather", axis=1)


EDGES = "under sequence parallelism, at the first and the last block"
REFUSED: list[tuple[Act, Act, str]] = [
    (entered, lambda s: s["norm"].sync("fwd_post", "all_gather", axis=1), EDGES),
    (entered, lambda s: s["norm"].sync("fwd_pre", "all_gather", axis=1), EDGES),
    (entered, lambda s: s["head"].sync("fwd_pre", "all_gather", axis=1), 'shard("weight", axis=...) before'),
    (left, lambda s: s["norm"].sync("fwd_post", "all_gather", axis=1), EDGES),
    (inside, lambda s: s["words"].sync("fwd_post", "reduce_scatter", axis=1), 'shard("weight", axis=0) before'),
    (
        inside,
        lambda s: s["words"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1),
        'or shard("weight", axis=0), whose output',
    ),
    (
        lambda s: s["words"].shard("weight", axis=0),
        lambda s: s["layers.0"].sync("fwd_pre", "reduce_scatter", axis=1),
        "shard the layers below",
    ),
    (
        lambda s: s["words"].shard("weight", axis=0),
        lambda s: s["layers.0.norm"].sync("fwd_pre", "reduce_scatter", axis=1),
        EDGES,
    ),
    (lambda s: None, lambda s: s["norm"].sync("fwd_post", "all_reduce"), "a module around that layer"),
]


@pytest.mark.parametrize(("before", "act", "word"), REFUSED)
def test_a_collective_where_nothing_is_split_is_refused(before: Act, act: Act, word: str, message: Messages) -> None:
    texts = set()
    for size in (1, 2):
        sch = slapo.create_schedule(Model(), mesh={"tp": size})
        before(sch)
        with pytest.raises(slapo.PreconditionError) as refused:
            act(sch)
        texts.add(str(refused.value))
    (text,) = texts
    message(text, word)


@MESHES
def test_a_gather_where_nothing_is_split_is_refused_in_a_sequential(size: int, message: Messages) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)), mesh={"tp": size})
    sch["0"].shard(["weight", "bias"], axis=0).sync("fwd_pre", "all_gather", axis=1)
    sch["1"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
    with pytest.raises(slapo.PreconditionError) as refused:
        sch["2"].sync("fwd_post", "all_gather", axis=1)
    message(refused, "at '2': ", EDGES)


@MESHES
def test_build_asks_for_a_reduction_and_tells_of_the_sequence(size: int, message: Messages) -> None:
    sch: Any = slapo.create_schedule(Model(), mesh={"tp": size})
    inside(sch, but="layers.0")
    sch["layers.1"].sync("fwd_post", "all_gather", axis=1)
    sch["words"].shard("weight", axis=0)
    sch["head"].shard("weight", axis=1)
    words, down, head = (str(each) for each in obligations(sch))
    for path, text in (("words", words), ("layers.0.down", down), ("head", head)):
        message(text, f'add sch[\'{path}\'].sync("fwd_post", "all_reduce")', '"reduce_scatter" with the axis')


@MESHES
@pytest.mark.parametrize("enter", ["words", "layers.0"])
def test_corrected_calls_of_refusals_are_accepted(enter: str, size: int) -> None:
    sch: Any = slapo.create_schedule(Model(), mesh={"tp": size})
    inside(sch)
    sch["words"].shard("weight", axis=0)
    if enter == "words":
        sch["words"].sync("fwd_post", "reduce_scatter", axis=1)
    else:
        sch["layers.0"].sync("fwd_pre", "reduce_scatter", axis=1, inputs=(0,))
    sch["layers.1"].sync("fwd_post", "all_gather", axis=1)
    assert list(obligations(sch)) == []
