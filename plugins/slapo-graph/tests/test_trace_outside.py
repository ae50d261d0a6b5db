"""What recorded code changes of Python objects outside of its graph is refused at its line, and put back."""

from __future__ import annotations

import collections
import dataclasses
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from tests.tiers import sampled

X = torch.arange(8.0).reshape(2, 4) / 8


class Terms(list[Any]):
    def take(self, term: Any) -> None:
        self.append(term)


class Notes:
    def __init__(self) -> None:
        self.terms: list[Any] = []
        self.total = 0.0


class Slotted:
    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0.0


@dataclasses.dataclass
class Loss:
    total: Any = 0.0


COUNT = [0] * 20
QUEUE: collections.deque[Any] = collections.deque()
NOTES = Notes()
SLOTTED = Slotted()
MANY = {str(number): number for number in range(40)}


class Layer(nn.Module):
    terms: list[Any] = []
    total = 0.0
    run: Callable[..., Any]

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.w, self.inner, self.run = nn.Linear(4, 4), Inner(), run
        self.own, self.queue = {"a": [1]}, collections.deque([1])
        self.notes, self.around = Notes(), (Notes(), nn.Identity())

    def forward(self, x: torch.Tensor, terms: Any = None) -> torch.Tensor:
        h = torch.tanh(self.w(x))
        self.run(self, h, terms)
        return x + self.inner(h)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.w = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.w(x))


class Net(nn.Module):
    def __init__(self, run: Callable[..., Any], terms: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.layer, self.make = Layer(run), terms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        terms = self.make()
        return self.layer(x, terms)


def adds(this: Any, h: Any, terms: Any) -> None:
    terms["balance"] = terms.get("balance", 0.0) + h.mean()


def deletes(this: Any, h: Any, terms: Any) -> None:
    del terms["balance"]


def appends(this: Any, h: Any, terms: Any) -> None:
    terms.append(h.mean())


def takes(this: Any, h: Any, terms: Any) -> None:
    terms.take(h.mean())


def sets(this: Any, h: Any, terms: Any) -> None:
    terms.total = h.mean()


def adds_deep(this: Any, h: Any, terms: Any) -> None:
    terms[0]["of"].append(h.mean())


def adds_to_set(this: Any, h: Any, terms: Any) -> None:
    terms.add(3)


ARGUMENTS: list[tuple[Callable[..., Any], Callable[[], Any]]] = [
    (adds, lambda: {"balance": 0.0}),
    (deletes, lambda: {"balance": 0.0}),
    (adds, lambda: collections.defaultdict(float)),
    (adds, lambda: collections.defaultdict(float, balance=0.0)),
    (adds, lambda: collections.OrderedDict(balance=0.0)),
    (deletes, lambda: collections.OrderedDict(balance=0.0)),
    (adds, lambda: collections.Counter(balance=0)),
    (adds, lambda: collections.UserDict(balance=0.0)),
    (adds, lambda: collections.OrderedDict({1: 2.0})),
    (appends, list),
    (appends, Terms),
    (takes, Terms),
    (appends, collections.UserList),
    (appends, collections.deque),
    (sets, Notes),
    (sets, Loss),
    (sets, SimpleNamespace),
    (adds_deep, lambda: ({"of": Terms()},)),
    (adds_deep, lambda: [collections.OrderedDict(of=[])]),
    (adds_to_set, lambda: {1, 2}),
]


@pytest.mark.parametrize("flatten", sampled([False, True]))
@pytest.mark.parametrize(("run", "terms"), ARGUMENTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_change_of_an_argument_is_refused_at_its_line(
    run: Callable[..., Any], terms: Callable[[], Any], flatten: bool
) -> None:
    refused(Net(run, terms), run, "layer", flatten=flatten)


def refused(model: nn.Module, run: Callable[..., Any], path: str, line: int = 1, **options: Any) -> str:
    sch = slapo.create_schedule(model, example_inputs=X)
    with pytest.raises(slapo.TraceError) as caught:
        sch[path].trace(**options)
    code = inspect.unwrap(run).__code__
    file, at = caught.value.location or ("", 0)
    assert file in (code.co_filename, __file__)
    assert code.co_firstlineno < at <= code.co_firstlineno + 4 or run is takes, (caught.value, at)
    assert caught.value.hint is not None
    assert "leaves=" in caught.value.hint
    return str(caught.value)


def to_a_class(this: Any, h: Any, terms: Any) -> None:
    this.terms.append(h)


def to_a_class_by_name(this: Any, h: Any, terms: Any) -> None:
    Layer.total = h.mean()


def to_a_child(this: Any, h: Any, terms: Any) -> None:
    this.inner.seen.append(h)


def sets_of_a_child(this: Any, h: Any, terms: Any) -> None:
    this.inner.aux = h.mean()


def to_itself(this: Any, h: Any, terms: Any) -> None:
    this.own["a"].append(h)


def to_a_queue(this: Any, h: Any, terms: Any) -> None:
    this.queue.append(h)


def to_an_object(this: Any, h: Any, terms: Any) -> None:
    this.notes.terms.append(h)


def to_an_object_in_a_tuple(this: Any, h: Any, terms: Any) -> None:
    this.around[0].total = h.mean()


def to_a_module_in_a_tuple(this: Any, h: Any, terms: Any) -> None:
    this.around[1].aux = h.mean()


def to_a_long_global(this: Any, h: Any, terms: Any) -> None:
    COUNT.append(1)


def in_a_long_global(this: Any, h: Any, terms: Any) -> None:
    MANY["3"] += 1


def to_a_global_queue(this: Any, h: Any, terms: Any) -> None:
    QUEUE.append(h)


def to_a_global_object(this: Any, h: Any, terms: Any) -> None:
    NOTES.terms.append(h)


def sets_of_a_global_object(this: Any, h: Any, terms: Any) -> None:
    NOTES.total += 1


def sets_a_slot(this: Any, h: Any, terms: Any) -> None:
    SLOTTED.total = h.mean()


def sets_a_new_global(this: Any, h: Any, terms: Any) -> None:
    global LAST
    LAST = h


def to_a_default(this: Any, h: Any, terms: Any, memory: list[Any] = []) -> None:  # noqa: B006
    memory.append(h)


def to_its_function(this: Any, h: Any, terms: Any) -> None:
    to_its_function.calls = getattr(to_its_function, "calls", 0) + 1  # type: ignore[attr-defined]


def closing() -> Callable[..., Any]:
    seen: dict[str, Any] = {}
    count = 0

    def run(this: Any, h: Any, terms: Any) -> None:
        nonlocal count
        count += 1
        seen["h"] = h

    return run


OUTSIDE = (
    to_a_class, to_a_class_by_name, to_a_child, sets_of_a_child, to_itself, to_a_queue, to_an_object,
    to_an_object_in_a_tuple, to_a_module_in_a_tuple, to_a_long_global, in_a_long_global, to_a_global_queue,
    to_a_global_object, sets_of_a_global_object, sets_a_slot, sets_a_new_global, to_a_default, to_its_function,
    closing(),
)  # fmt: skip


def state() -> Any:
    return [len(COUNT), MANY["3"], len(QUEUE), len(NOTES.terms), NOTES.total, SLOTTED.total, Layer.terms, Layer.total]


@pytest.mark.parametrize("run", OUTSIDE, ids=lambda run: run.__name__)
def test_a_change_outside_is_refused_at_its_line_and_put_back(run: Callable[..., Any]) -> None:
    before = state()
    for flatten in (False, True):
        model = Net(run)
        refused(model, run, "layer", flatten=flatten)
        assert [len(each) for each in (model.layer.own["a"], model.layer.queue, model.layer.inner.seen)] == [1, 1, 0]
    assert state() == before
    assert "LAST" not in globals()
