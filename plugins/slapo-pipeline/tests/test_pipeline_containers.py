"""Every kind of container can be cut: loops, sequences, nested models, tuples, dataclasses, dictionaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from .staging import compare, cut


class Block(nn.Module):
    """Returns a tuple of tensor, None and number of steps, as many blocks do."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Any, mask: Any = None, bias: Any = None) -> Any:
        y = self.fc(x)
        if mask is not None:
            y = y * mask
        if bias is not None:
            y = y + bias
        return y.tanh(), None, y.mean(-1)


@dataclass
class Out:
    last: torch.Tensor
    everything: tuple[torch.Tensor, ...]
    extra: Any = None


class Loop(nn.Module):
    def __init__(self, blocks: int = 3, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.linspace(0, 1, width))

    def forward(self, x: Any, mask: Any = None) -> Any:
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=x.dtype)
        mask = mask[:, :, None]
        bias = self.scale.exp() * self.shift  # before the loop
        seen = [x]
        means = {}
        h = self.first(x)
        for number, block in enumerate(self.blocks):
            h, nothing, mean = block(h, mask=mask, bias=bias)
            assert nothing is None
            seen.append(h)
            means[f"block {number}"] = mean
        return Out(h * self.shift, tuple(seen), {"means": means, "blocks": len(self.blocks), "text": "done"})


class Outer(nn.Module):
    """Cuts lie two levels below; a tail that both parts share; the inner output is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Loop(), Loop()
        self.tail = nn.Linear(6, 6)

    def forward(self, x: Any, *, mask: Any = None) -> Any:
        one = self.left(x, mask)
        a = self.tail(one.last)
        two = self.right(a, mask=mask)
        b = self.tail(two.last)
        return {"a": a, "b": b, "one": one, "list": [two.everything[1], None, 3]}


class Whole(nn.Module):
    """Hands on whole what a module returned, and returns whole what another did."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Taker()
        self.middle = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        out = self.first(x)
        return self.last(self.middle(x), out)


class Taker(nn.Module):
    def forward(self, x: Any, out: Any) -> Any:
        return {"sum": x + out[0], "nested": (out[2], [x.exp(), None, "text", 4])}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("mask", [True, False])
def test_loop_over_a_list_of_blocks_that_return_tuples(train: bool, mask: bool) -> None:
    torch.manual_seed(0)
    x = torch.rand(3, 5, 6, dtype=torch.float64)
    call = {"mask": torch.tensor([[1.0, 1, 1, 0, 0]] * 3, dtype=torch.float64)} if mask else {}
    made = compare(Loop().double().train(train), ["blocks.0", "blocks.1"], x, **call)
    first, second, last = made.partition.stages
    assert first.inputs == ("x", "mask")[: 1 + mask]
    assert second.inputs == last.inputs == (("mask",) if mask else ("x",)), "a mask of ones is made again"
    assert made.liveness.sent(0)[0] == "blocks_0_0"
    assert not any("mask" in name or "ones" in name for name in made.partition.values)


@pytest.mark.parametrize("shape", [(1, 1, 6), (1, 7, 6), (5, 2, 6)])
def test_batches_of_other_sizes_and_without_order_in_memory(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.rand(*shape[::-1], dtype=torch.float64).permute(2, 1, 0)
    assert x.numel() == 6 or not x.is_contiguous()
    compare(Loop().double(), ["blocks.0"], x)


def test_cuts_two_levels_deep_and_a_shared_tail() -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 3, 6, dtype=torch.float64)
    cuts = ["left.blocks.1", "right.blocks.0", "left.first"]
    made = compare(Outer().double(), cuts, x, mask=torch.ones(2, 3, dtype=torch.float64))
    assert [stage.last for stage in made.partition.stages] == ["left.first", "left.blocks.1", "right.blocks.0", None]
    assert {tie.name: tie.stages for tie in made.partition.ties} == {"tail.weight": (2, 3), "tail.bias": (2, 3)}


def test_a_cut_may_stand_after_a_module_that_contains_other_cuts() -> None:
    torch.manual_seed(0)
    made = compare(Outer().double(), ["left", "left.blocks.0", "right"], torch.rand(2, 3, 6, dtype=torch.float64))
    assert [stage.last for stage in made.partition.stages] == ["left.blocks.0", "left", "right", None]


def test_untouched_paths_and_objects() -> None:
    model = Outer().double()
    made = cut(model, ["left.blocks.1"], torch.rand(2, 3, 6, dtype=torch.float64))
    first, last = (stage.module for stage in made.partition.stages)
    assert first.get_submodule("left.blocks.0.fc") is model.left.blocks[0].fc
    assert last.get_submodule("right") is model.right
    assert dict(first.named_parameters())["left.scale"] is model.left.scale
    names = {name for stage in (first, last) for name in stage.state_dict()}
    assert names == set(model.state_dict())
    assert "left.blocks.2.fc.weight" not in first.state_dict()
    first.eval()
    assert not model.left.training
    assert not model.left.blocks[0].training
    assert model.right.training


@pytest.mark.parametrize("cuts", [["first"], ["middle"], ["first", "middle"]])
def test_containers_returned_by_calls_cross_cuts(cuts: list[str]) -> None:
    torch.manual_seed(0)
    made = compare(Whole().double(), cuts, torch.rand(2, 3, 6, dtype=torch.float64))
    assert set(made.partition.output.names) == {"last_sum", "last_nested_0", "last_nested_1_0"}


def test_a_sequential_model_is_cut_anywhere() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2)
    )
    made = compare(model.double(), ["0", "2.0", "1"], torch.rand(3, 4, dtype=torch.float64))
    assert [stage.last for stage in made.partition.stages] == ["0", "1", "2.0", None]


def test_output_can_be_put_together_of_anything() -> None:
    made = cut(Loop(), ["blocks.0"], torch.rand(2, 3, 6))
    out = made.partition.output
    named = out.assemble({name: name for name in out.names})
    assert isinstance(named, Out)
    assert named.everything[1] == "blocks_0_0"
    assert named.extra["blocks"] == 3
    assert out.assemble({}).last is None
