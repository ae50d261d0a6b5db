"""Traced modules and split ones, in either order: verify runs the traced graphs on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_graph.patterns.matcher import AlternativeMatcher
from slapo_graph.tracing.tracer import RecordTracer
from slapo_testing import run_ranks

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.heads = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], self.heads, 2)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)
        return self.out(y)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up, self.down, self.norm = Attention(), nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return self.norm(x + self.down(F.gelu(self.up(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def split_mlp(block: Any) -> None:
    block["up"].shard(["weight", "bias"], axis=0)
    block["up"].sync("backward")
    block["down"].shard("weight", axis=1)
    block["down"].sync("forward")


def split_attention(block: Any) -> None:
    for name in "qkv":
        block[f"attention.{name}"].shard(["weight", "bias"], axis=0)
    block["attention"].sync("bwd_post", "all_reduce", inputs=("x",))
    block["attention.out"].shard("weight", axis=1)
    block["attention.out"].sync("forward")


def trace_then_split(sch: slapo.Schedule, flatten: bool) -> None:
    for index in ("0", "1"):
        sch[index].trace(flatten=flatten, leaves="attention" if flatten else ())
        split_mlp(sch[index])


def split_then_trace(sch: slapo.Schedule, flatten: bool) -> None:
    for index in ("0", "1"):
        split_mlp(sch[index])
        sch[index].trace(flatten=flatten, leaves="attention" if flatten else ())


def trace_beside(sch: slapo.Schedule, flatten: bool) -> None:
    sch["0"].trace(flatten=flatten)
    split_mlp(sch["1"])
    sch["1.norm"].trace()


def split_heads_and_trace_around(sch: slapo.Schedule, flatten: bool) -> None:
    split_attention(sch["0"])
    sch["0.attention"].shard_attribute("heads")
    sch["0"].trace(flatten=flatten, leaves=Attention if flatten else ())
    sch["0.attention"].trace(example_inputs=X)


class Biased(nn.Module):
    """The first attention makes a bias of its table, a row for each head, and hands it to the others, as in T5."""

    class Attention(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
            self.table = nn.Embedding(8, 4) if first else None

        def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            if bias is None:
                assert self.table is not None
                place = torch.arange(x.shape[1])
                bias = self.table((place[:, None] - place).abs()).permute(2, 0, 1)
            weights = F.dropout((q @ k.mT + bias).softmax(-1), 0.1, self.training)
            return self.out((weights @ v).transpose(1, 2).flatten(2)), bias

    class Layer(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.attention = Biased.Attention(first)

        def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            y, bias = self.attention(x, bias)
            return x + y, bias

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(index == 0) for index in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


def split_biased(sch: slapo.Schedule) -> None:
    sch["layers.0.attention.table"].shard("weight", axis=1)
    for attention in sch["layers.*.attention"]:
        for name in "qkv":
            attention[name].shard(["weight", "bias"], axis=0)
        attention["out"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        attention.sync("bwd_post", "all_reduce", inputs=("x",))
        attention.fork_rng()


def kernels_biased(sch: slapo.Schedule) -> None:
    sch["layers.*"].trace(flatten=True)
    sch["layers.*"].checkpoint(match=lambda x: x.softmax(-1))


@pytest.mark.parametrize("steps", [(split_biased, kernels_biased), (kernels_biased, split_biased)])
def test_shards_that_one_layer_hands_to_the_next_are_found_in_either_order(steps: Any) -> None:
    sch = slapo.create_schedule(Biased(), mesh={"tp": 2}, example_inputs=X)
    for step in steps:
        step(sch)
    assert len(sch.find("dropout")) == 3  # looks at the present graphs
    for layer in sch["layers.*"]:
        assert "all_reduce" in str(layer.graph)
        assert "checkpoint" in str(layer.graph)
        assert "fork = fork(" in str(layer.graph)
    again = slapo.replay(Biased(), sch.to_json(), example_inputs=X)
    assert len(again.find("dropout")) == 3
    assert [str(layer.graph) for layer in again["layers.*"]] == [str(layer.graph) for layer in sch["layers.*"]]


def test_a_split_layer_under_a_checkpoint_stays_a_call_of_the_graph_around_it() -> None:
    sch = slapo.create_schedule(model(), mesh={"tp": 2}, example_inputs=X)
    split_mlp(sch["0"])
    sch["0.down"].checkpoint()
    sch["0"].trace(flatten=True)
    assert "self.down(" in str(sch["0"].graph)
    assert "self.up(" not in str(sch["0"].graph)


WAYS = (trace_then_split, split_then_trace, trace_beside, split_heads_and_trace_around)


def verified() -> list[tuple[str, int]]:
    found = []
    for way in WAYS:
        for flatten in (False, True):
            sch = slapo.create_schedule(model(), mesh={"tp": 2}, example_inputs=X)
            way(sch, flatten)
            report = slapo.verify(sch, X)
            found.append((f"{way.__name__} {flatten}", report.steps_verified - len(sch.records)))
    return found


def wrongly_split() -> str:
    sch = slapo.create_schedule(model(), mesh={"tp": 2}, example_inputs=X)
    sch["0"].trace(flatten=True)
    sch["0.up"].shard(["weight", "bias"], axis=0)
    sch["0.down"].shard("weight", axis=1)  # and no all-reduce
    try:
        slapo.verify(sch, X)
    except slapo.VerifyError as error:
        return str(error)
    return "passed"


def half_split() -> str:
    sch = slapo.create_schedule(model(), mesh={"tp": 2}, example_inputs=X)
    split_attention(sch["0"])  # and not its number of heads
    sch["0.attention"].trace()  # as the last step before which its forward runs
    try:
        slapo.verify(sch, X)
    except slapo.SlapoError as error:
        return str(error)
    return "passed"


def everything() -> Any:
    return verified(), wrongly_split(), half_split()


@pytest.mark.ranks
@pytest.mark.breadth
def test_traced_and_split_modules_agree_with_the_untouched_model_in_any_order() -> None:
    for found, wrong, half in run_ranks(everything, world_size=2):
        assert found == [(f"{way.__name__} {flatten}", 0) for way in WAYS for flatten in (False, True)]
        assert "0.down" in wrong
        assert "raises on rank 0 where the reference model does not: RuntimeError: shape '[2, 5, 4, 2]'" in half


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled with a word for each run that records, and for each form of a pattern that is looked for."""
    seen: list[str] = []
    trace, start = RecordTracer.trace, AlternativeMatcher.__init__
    monkeypatch.setattr(RecordTracer, "trace", lambda *args: (seen.append("recorded"), trace(*args))[1])
    monkeypatch.setattr(AlternativeMatcher, "__init__", lambda *args: (seen.append("searched"), start(*args))[1])
    return seen


def test_layers_that_are_alike_are_recorded_and_searched_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch)
    costs = []
    for layers in (1, 4):
        blocks = nn.Sequential(*(Block() for _ in range(layers)))
        schedule = slapo.create_schedule(blocks, mesh={"tp": 2}, example_inputs=X)
        for block in schedule["*"]:
            block.trace(flatten=True)
            block.replace(F.gelu, match=nn.GELU())
        for block in schedule["*"]:
            split_attention(block)
            block["attention"].shard_attribute("heads")
            split_mlp(block)
        assert {str(block.graph).count(" all_reduce_(") for block in schedule["*"]} == {2}
        costs.append(list(seen))
        seen.clear()
    assert costs[0] == costs[1]


def test_a_layer_that_cannot_run_yet_is_followed_when_the_attribute_that_was_in_the_way_is_split() -> None:
    schedule = slapo.create_schedule(nn.Sequential(Block(), Block()), mesh={"tp": 2}, example_inputs=X)
    for block in schedule["*"]:
        block.trace(flatten=True)
    for block in schedule["*"]:
        split_attention(block)
        assert not block.graph.holds(block.module)
        block["attention"].shard_attribute("heads")
        assert block.graph.holds(block.module)
