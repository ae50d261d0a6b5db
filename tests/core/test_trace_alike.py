"""A call is not run again only where an earlier one is proved to be the same run; each proof has its control."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_core.tracing import flat


class Block(nn.Module):
    """Counts how often it is really run."""

    runs = 0

    def __init__(self, config: Any, **own: Any) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(4, 4)
        self.options = {"wide": False}
        self.__dict__.update(own)

    def forward(self, x: Any, cache: Any = None) -> Any:
        Block.runs += 1
        if self.config.twice:
            x = torch.cat([x, x])
        if self.options["wide"]:
            return torch.cat([x, x], -1)
        if cache is not None:
            cache.append(x)
        if self.training and getattr(self, "is_last", False):
            return x, x
        return self.fc(x)


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any) -> Any:
        return [block(x) for block in self.blocks]


class Config:
    def __init__(self, *, twice: bool = False) -> None:
        self.twice = twice


config = Config


class ReadsConfig(nn.Module):
    """Reads the configuration first: what it reads is known as its own."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Any) -> Any:
        return x if self.config.twice else x * 2


def runs(model: nn.Module, *, x: Any = None) -> tuple[int, list[Any]]:
    """How many blocks were run, and the shapes of what each gave."""
    Block.runs = 0
    x = torch.rand(2, 4) if x is None else x
    graph = flat(model, type(model).forward, {"x": x}, lambda module, path: True)
    calls = [node for node in graph.graph.nodes if node.op == "call_module"]
    return Block.runs, [_shape(graph.values[node]) for node in calls]


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else [_shape(part) for part in value]


def hooked(block: nn.Module) -> nn.Module:
    block.register_forward_hook(lambda module, args, out: (out, out))
    return block


def inner_hooked(block: Any) -> nn.Module:
    block.fc.register_forward_hook(lambda module, args, out: out[:1])
    return block


SHARED = config()
FIRST = {"shape": (2, 4)}
CASES: list[tuple[Any, int, list[Any]]] = [
    (lambda: Model(*[Block(SHARED) for _ in range(3)]), 1, [(2, 4)] * 3),
    (lambda: Model(Block(config()), Block(config(twice=True))), 2, [(2, 4), (4, 4)]),
    (lambda: Model(ReadsConfig(SHARED), Block(SHARED), Block(config(twice=True))), 2, [(2, 4), (2, 4), (4, 4)]),
    (lambda: Model(Block(SHARED), Block(SHARED, options={"wide": True})), 2, [(2, 4), (2, 8)]),
    (lambda: Model(Block(SHARED), Block(SHARED, is_last=True)), 2, [(2, 4), [(2, 4), (2, 4)]]),
    (lambda: Model(Block(SHARED), hooked(Block(SHARED))), 2, [(2, 4), [(2, 4), (2, 4)]]),
    (lambda: Model(Block(SHARED), inner_hooked(Block(SHARED))), 2, [(2, 4), (1, 4)]),
    (lambda: Model(Block(SHARED), Block(SHARED, is_last=True).eval()), 2, [(2, 4), (2, 4)]),
    (lambda: Model(Block(SHARED), Block(SHARED).double().float().requires_grad_(requires_grad=False)), 2, [(2, 4)] * 2),
]  # fmt: skip


@pytest.mark.parametrize(("make", "expected", "shapes"), CASES)
def test_only_the_same_run_is_not_run_again(make: Any, expected: int, shapes: list[Any]) -> None:
    assert runs(make()) == (expected, shapes)


class Chain(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def test_results_carry_gradients_as_those_of_the_run() -> None:
    model = Chain(*[Block(SHARED) for _ in range(3)])
    Block.runs = 0
    graph = flat(model, Chain.forward, {"x": torch.rand(2, 4)}, lambda module, path: True)
    values = [graph.values[node] for node in graph.graph.nodes if node.op == "call_module"]
    assert Block.runs == 2, "the first one gets an argument without gradient"
    assert all(value.requires_grad and not value.is_leaf for value in values)
    assert len({graph.storages[node] for node in graph.graph.nodes if node.op == "call_module"}) == 3


class Counts(nn.Module):
    """Changes something at every call: an attribute of a shared object, a list, a buffer, its argument."""

    def __init__(self, shared: Any, what: str) -> None:
        super().__init__()
        self.shared, self.what = shared, what
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        if self.what == "attribute":
            self.shared.calls += 1
            return x[: self.shared.calls] * 2
        if self.what == "list":
            self.shared.calls.append(1)
            return x[: len(self.shared.calls)] * 2
        if self.what == "buffer":
            self.seen += 1
            return x * 2
        if self.what == "argument":
            x += 1
            return x * 2
        return x.view(-1)


class Shared:
    def __init__(self, calls: Any) -> None:
        self.calls = calls


class Reads(nn.Module):
    """Reads the shared object first: then it is none of the other blocks' own."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Any) -> Any:
        return x + 1 if self.shared.calls is None else x + 2


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("what", ["attribute", "list", "buffer", "argument", "view"])
def test_a_call_that_changes_something_stands_for_no_other(
    what: str, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    original = Counts.forward
    monkeypatch.setattr(Counts, "forward", lambda self, x: counted.append(1) or original(self, x))
    shared = Shared([] if what == "list" else 0)
    blocks = [Counts(shared, what) for _ in range(3)]
    model = Model(Reads(shared), *blocks) if elsewhere else Model(*blocks)
    graph = flat(model, Model.forward, {"x": torch.rand(5, 4)}, lambda module, path: True)
    assert len(counted) == 3
    if what in ("attribute", "list"):
        lengths = [graph.values[node].shape[0] for node in graph.graph.nodes if node.op == "call_module"]
        assert lengths[-3:] == [1, 2, 3]
        assert shared.calls in ([], 0), "and it is taken back"
    if what == "buffer":
        assert graph.written == {f"blocks.{number + elsewhere}.seen" for number in range(3)}


class LooksIntoValues(nn.Module):
    def __init__(self, count: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("count", torch.tensor(float(count)))
        self.register_buffer("counts", torch.tensor([count, 0]))

    def forward(self, x: Any) -> Any:
        count = self.counts.tolist()[0] if self.how == "all values" else int(float(self.count + 1)) - 1
        return x.repeat(count, 1) * 1.0


@pytest.mark.parametrize("how", ["all values", "one value"])
def test_a_call_that_looks_into_the_values_of_a_buffer_stands_for_no_other(how: str) -> None:
    assert runs(Model(LooksIntoValues(1, how), LooksIntoValues(2, how)))[1] == [(2, 4), (4, 4)]
