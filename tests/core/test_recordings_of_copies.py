"""Copies of a model share a recording only if it would be recorded alike: every change of one of them is seen."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import GuardError, tracing
from slapo_core.graph.copies import CopiedRecordings, copies_share

WIDE = False
SEEN: list[int] = []


class Config:
    def __init__(self) -> None:
        self.is_doubled = False


class Block(nn.Module):
    """A module that stays a call; all of these decide what it gives."""

    looks = ""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(4, 4), 4
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("sizes", torch.tensor([4, 2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if self.looks == "all values":
            h = h[:, : self.sizes.tolist()[0]]
        if self.looks == "a global name":
            SEEN.append(1)
        if self.looks == "one value" and float(self.steps + 1) > 2:
            h = h[:1]
        if WIDE or hasattr(self.sizes, "is_narrow"):
            h = h[:2]
        return h[:, : self.keep]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config, self.scale = Config(), 2.0
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor, mask: Any = None, kind: str = "sum") -> Any:
        h = self.second(self.first(x)) * self.scale
        if self.config.is_doubled:
            h = h * 2
        batch, width = h.shape
        return (h.sum(), (batch, width)) if kind == "sum" and mask is not h else h


def record(model: nn.Module, x: Any = None, **more: Any) -> tracing.FlatGraph:
    given = {"x": torch.ones(3, 4) if x is None else x, **more}
    return tracing.flat(model, type(model).forward, given, lambda module, path: path != "")


def told(flat: tracing.FlatGraph) -> list[Any]:
    """All that there is to know of it, without what is the model's own."""

    def form(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.dtype, str(value.device), value.requires_grad
        parts = tracing.children(value)
        return str(value) if parts is None else (type(value), [(key, form(part)) for _, key, part in list(parts)])

    nodes = list(flat.graph.nodes)
    memory = {number: place for place, number in reversed(list(enumerate(map(flat.storages.get, nodes))))}
    lines = [
        (str(node), node.op, str(node.target), str(node.args), node.meta.get("location"), form(flat.values.get(node)))
        for node in nodes
    ]
    shared = [memory[flat.storages.get(node)] for node in nodes]
    writes = {str(node): list(map(str, written)) for node, written in flat.writes.items()}
    return [lines, shared, writes, flat.guards, flat.written, list(flat.inlined), flat.state]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What was run to be recorded, in a place where copies share."""
    made: list[Any] = []
    run = tracing._run

    def noted(module: nn.Module, *rest: Any) -> Any:
        made.append(module)
        return run(module, *rest)

    monkeypatch.setattr(tracing, "_run", noted)
    with copies_share(CopiedRecordings()):
        yield made


def test_a_copy_is_not_run_again_and_has_a_graph_of_its_own(runs: list[Any]) -> None:
    model = Model()
    first = record(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.first.linear.weight.fill_(2.0)  # of several elements: what they are decides nothing
    second = record(other)
    assert len(runs) == 1
    assert told(first) == told(second)
    assert first.graph is not second.graph
    assert second.module is second.inlined[""] is other
    second.graph.erase_node(next(iter(reversed(second.graph.nodes))))
    second.forget()
    assert told(record(copy.deepcopy(model))) == told(first)
    second.require()
    other.scale = 3.0
    with pytest.raises(GuardError, match=r"self\.scale == 2\.0"):
        second.require()
    first.require()


def test_what_is_kept_holds_no_model(runs: list[Any]) -> None:
    model = Model()
    flat = record(model)
    flat.forget()
    gone = [weakref.ref(model), weakref.ref(model.first.linear.weight)]
    runs.clear()
    del model, flat
    gc.collect()
    assert [one() for one in gone] == [None, None]
    record(Model())
    assert runs == []


def _set(path: str, name: str, value: Any) -> Callable[[Model], None]:
    return lambda model: setattr(model.get_submodule(path), name, value)


def _wide(model: Model) -> None:
    global WIDE
    WIDE = True


def _forward(model: Model) -> None:
    original = model.first.forward
    model.first.forward = lambda x: original(x)[:2]  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Model], Any]] = {
    "a flag of the root": _set("", "scale", 3.0),
    "a flag of a module that stays a call": _set("second", "keep", 3),
    "the configuration": lambda model: setattr(model.config, "is_doubled", True),
    "another module": _set("first", "linear", nn.Sequential(nn.Linear(4, 4)).append(nn.ReLU())),
    "a module of another size": _set("second", "linear", nn.Linear(4, 3)),
    "another class": lambda model: setattr(model.first, "__class__", type("Other", (Block,), {})),
    "the values of a buffer": lambda model: model.first.steps.fill_(2.0),
    "another buffer": lambda model: model.first.register_buffer("steps", torch.tensor(5.0)),
    "a buffer that is not read": lambda model: model.first.sizes.add_(1),
    "a frozen parameter": lambda model: model.first.linear.weight.requires_grad_(False),
    "another dtype": lambda model: model.double(),
    "a mode": lambda model: model.second.eval(),
    "a hook": lambda model: model.first.linear.register_forward_hook(lambda *_: None),
    "a hook before": lambda model: model.first.register_forward_pre_hook(lambda *_: None),
    "a hook of the root": lambda model: model.register_forward_hook(lambda *_: None),
    "a forward of its own": _forward,
    "a tied weight": lambda model: setattr(model.second.linear, "weight", model.first.linear.weight),
    "one memory": lambda model: setattr(model.second.linear.weight, "data", model.first.linear.weight.data),
    "a mark on a tensor": lambda model: setattr(model.first.sizes, "is_narrow", True),
    "a global name": _wide,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_copy_is_recorded_by_itself(name: str, runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "WIDE", False)
    model = Model()
    record(model)
    other = copy.deepcopy(model)
    CHANGES[name](other)
    x = torch.ones(3, 4, dtype=other.first.linear.weight.dtype) if name == "another dtype" else None
    flat = record(other, x)
    assert runs == [model, other]
    with copies_share(CopiedRecordings()):
        assert told(record(other, x)) == told(flat)


@pytest.mark.parametrize(
    "given",
    [
        {"x": torch.ones(2, 4)},
        {"x": torch.ones(4, 3).t()},
        {"x": torch.ones(3, 4, requires_grad=True)},
        {"kind": "none"},
        {"mask": torch.ones(3)},
        {"mask": 1},
        {"mask": [1, None]},
    ],
)
def test_other_arguments_are_recorded_by_themselves(given: dict[str, Any], runs: list[Any]) -> None:
    record(Model())
    record(Model(), **given)
    record(Model(), **given)
    assert len(runs) == 2


def test_other_surroundings_are_recorded_by_themselves(runs: list[Any]) -> None:
    record(Model())
    with torch.no_grad():
        record(Model())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        record(Model())
    same = torch.ones(3, 4)
    record(Model(), same, mask=same)
    record(Model(), same, mask=torch.ones(3, 4))
    assert len(runs) == 5
    assert record(Model()).state[0]
    assert len(runs) == 5


@pytest.mark.parametrize("looks", ["all values", "one value", "a global name"])
def test_what_looks_into_values_or_changes_what_it_read_is_never_shared(
    looks: str, runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Block, "looks", looks)
    SEEN.clear()
    model = Model()
    record(model)
    record(copy.deepcopy(model))
    assert len(runs) == 2


def test_recordings_are_shared_in_one_place_only(runs: list[Any]) -> None:
    model = Model()
    record(model)
    with copies_share(CopiedRecordings()):
        record(model)
    record(model)
    assert len(runs) == 2


def test_torch_finds_calls_with_parameters_among_those_that_it_knows() -> None:
    weight, x = nn.Parameter(torch.ones(7)), torch.ones(2, 7)
    mode, seen = tracing.FakeMode(), "non-fake tensor"
    before = mode.cache_info().bypasses.get(seen, 0)
    with mode:
        fake = mode.fake(x)
        made = [fake * weight, torch.cat([fake[0], weight]), fake.add_(other=weight)]
    assert mode.cache_info().bypasses.get(seen, 0) == before
    assert [tuple(one.shape) for one in made] == [(2, 7), (14,), (2, 7)]
    assert made[0].grad_fn.next_functions[1][0].variable is weight
