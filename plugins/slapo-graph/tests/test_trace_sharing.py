"""Identical blocks share one recording; blocks that differ in anything that was read do not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from tests.tiers import sampled

X = torch.randn(2, 3, 4)


class Settings:
    def __init__(self) -> None:
        self.gain = 1.0


class Inner(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.other = nn.Linear(4, 4)
        self.index, self.gain, self.fn, self.settings = index, 1.0, F.gelu, Settings()
        self.table = {"shift": 0.0}
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.other(self.drop(self.fn(self.fc(x)))) * self.gain * self.settings.gain + self.table["shift"]
        return y + self.seen


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner, self.index, self.reads_index = Inner(index), index, False

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        if self.reads_index:
            return self.inner(x) * (2 if self.index % 2 else 1)
        return self.inner(x)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(index) for index in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def traced(model: nn.Module, **options: Any) -> slapo.Schedule:
    sch = slapo.create_schedule(model, example_inputs=X)
    sch["layers.*"].trace(**options)
    return sch


def first_graphs(sch: slapo.Schedule) -> list[Any]:
    return [sch[f"layers.{index}"].graph.first for index in range(3)]  # type: ignore[union-attr]


def assert_computes_the_same(model: nn.Module, plain: nn.Module) -> None:
    for mode in (True, False):
        outcomes = []
        for one in (model.train(mode), plain.train(mode)):
            torch.manual_seed(3)
            one.zero_grad()
            out = one(X)
            out.sum().backward()
            outcomes.append([out, *(parameter.grad for parameter in one.parameters())])
        for mine, other in zip(*outcomes, strict=True):
            assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine is other


@pytest.mark.parametrize("flatten", [False, True])
def test_identical_blocks_share_one_recording_in_every_mode_and_copy(flatten: bool) -> None:
    plain = Stack()
    model = copy.deepcopy(plain)
    sch = traced(model, flatten=flatten)
    assert len(set(map(id, first_graphs(sch)))) == 1
    assert_computes_the_same(model, plain)
    graphs = [sch[f"layers.{index}"].graph for index in range(3)]
    # Train; eval; and eval of the first, whose input needs no gradient.
    assert len({id(variant) for graph in graphs for variant in graph.variants}) == 3
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin.layers[1].inner.fc.weight.mul_(2)
        reference = copy.deepcopy(plain)
        with torch.no_grad():
            reference.layers[1].inner.fc.weight.mul_(2)
        assert_computes_the_same(twin, reference)


class Other(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


def tie(block: Block) -> None:
    block.inner.other.weight = block.inner.fc.weight


def hook(block: Block) -> None:
    block.inner.fc.register_forward_hook(lambda module, args, out: out * 2)


def doubled(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, self.weight) * 2


def wrap(block: Block) -> None:
    block.inner.fc.forward = MethodType(doubled, block.inner.fc)  # type: ignore[method-assign]


def set_on(path: str, name: str, value: Any) -> Callable[[Block], None]:
    return lambda block: setattr(block.get_submodule(path), name, value)


DIFFERENCES: dict[str, tuple[Callable[[Block], Any], bool]] = {
    "attribute": (set_on("inner", "gain", 2.0), True),
    "type of an attribute": (set_on("inner", "gain", 1), True),
    "function": (set_on("inner", "fn", F.relu), True),
    "attribute of an object": (lambda block: setattr(block.inner.settings, "gain", 2.0), True),
    "item of a table": (lambda block: block.inner.table.update(shift=1.0), True),
    "index that is read": (set_on("", "reads_index", True), True),
    "dropout rate": (set_on("inner.drop", "p", 0.1), True),
    "class below": (set_on("inner", "fc", Other(4, 4)), True),
    "hook below": (hook, True),
    "wrapped below": (wrap, True),
    "tied inside": (tie, True),
    "frozen": (lambda block: block.inner.fc.weight.requires_grad_(False), True),
    "dtype": (set_on("inner", "seen", torch.zeros((), dtype=torch.float64)), True),
    "shape": (set_on("inner", "seen", torch.zeros(4)), True),
    "no bias": (set_on("inner.fc", "bias", None), True),
    "mode below": (lambda block: block.inner.drop.eval(), True),
    "one more child": (lambda block: block.inner.add_module("more", nn.Linear(2, 2)), True),
    "index that is not read": (set_on("", "index", 77), False),
    "values": (lambda block: nn.init.ones_(block.inner.fc.weight), False),
}


@pytest.mark.parametrize(
    ("name", "flatten"),
    sampled(
        [*((name, True) for name in DIFFERENCES), *((name, False) for name in ("attribute", "index that is not read"))]
    ),
)
def test_a_block_that_differs_has_its_own_recording(name: str, flatten: bool) -> None:
    change, is_apart = DIFFERENCES[name]
    plain = Stack()
    change(plain.layers[1])
    model = copy.deepcopy(plain)
    sch = traced(model, flatten=flatten)
    first, second, third = first_graphs(sch)
    assert first is third
    assert (second is not first) == is_apart
    assert_computes_the_same(model, plain)


def test_blocks_with_other_leaves_or_places_do_not_share_recordings() -> None:
    plain = Stack()
    model = copy.deepcopy(plain)
    sch = slapo.create_schedule(model, example_inputs=X)
    sch["layers.0"].trace(flatten=True)
    sch["layers.1"].trace(flatten=True, leaves=Inner)
    sch["layers.2"].trace()
    graphs = first_graphs(sch)
    assert len(set(map(id, graphs))) == 3
    assert "self.inner(x)" in str(sch["layers.1"].graph)
    assert_computes_the_same(model, plain)


@pytest.mark.parametrize("leaves", [Inner, "Inner", "inner", "inn*", (nn.ReLU, "*.Inner"), "plugins.*.Inner"])
def test_leaves_are_named_by_class_name_path_or_glob(leaves: Any) -> None:
    sch = traced(Stack(), flatten=True, leaves=leaves)
    assert "self.inner(x)" in str(sch["layers.0"].graph)
    with pytest.raises(slapo.PreconditionError, match=r"not a module class"):
        traced(Stack(), flatten=True, leaves=(int,))
