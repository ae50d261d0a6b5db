"""A traced module computes what the reference model computes, or says why it cannot: whatever is done to it."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing.models import Enclosing

from . import hostile_models as hostile

HERE = sys.modules[hostile.__name__]
X = torch.arange(24.0).reshape(3, 2, 4) / 24


def pair(forward: Callable[..., Any], *args: Any, **options: Any) -> tuple[nn.Module, nn.Module, slapo.Schedule]:
    """A reference model and its traced copy."""
    torch.manual_seed(0)
    plain = Enclosing(hostile.model(forward)())
    twin = copy.deepcopy(plain)
    sch = slapo.create_schedule(twin, example_inputs=args or (X,))
    sch["below"].trace(**options)
    return plain, twin, sch


def outcome(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Outputs, gradients, what became of the arguments, and the next random number."""
    model.zero_grad()
    args, kwargs = copy.deepcopy((args, kwargs))
    torch.manual_seed(5)
    out = model(*args, **kwargs)
    parts = list(out) if isinstance(out, tuple) else [out]
    if parts[0].requires_grad:
        sum(part.float().square().sum() for part in parts).backward()
    is_same = [one is other for one in parts for other in parts]
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*parts, *gradients, args, kwargs, is_same, torch.rand(1)]


def assert_equal(mine: Any, plain: Any) -> None:
    assert type(mine) is type(plain)
    if isinstance(mine, torch.Tensor):
        assert (mine.dtype, mine.requires_grad) == (plain.dtype, plain.requires_grad)
        assert torch.equal(mine, plain)
    elif isinstance(mine, (tuple, list)):
        assert len(mine) == len(plain)
        for one, other in zip(mine, plain, strict=True):
            assert_equal(one, other)
    elif isinstance(mine, dict):
        assert_equal(list(mine.items()), list(plain.items()))
    else:
        assert mine == plain


SAME: dict[str, tuple[Any, list[tuple[Any, ...]]]] = {
    "random numbers": (hostile.draws, [(X,), (X[:2],)]),
    "writes to an argument": (hostile.writes_to_argument, [(X,), (X[:, :1],)]),
    "views, and one tensor twice": (hostile.returns_views, [(X,)]),
    "a tensor as default": (hostile.default_tensor, [(X,), (X, torch.tensor(5.0))]),
    "a decorator": (hostile.decorated, [(X,)]),
    "nested regions": (hostile.nested_regions, [(X,)]),
    "called twice, unbound": (hostile.twice, [(X,), (X[:1],)]),
    "broadcasting": (hostile.broadcasts, [(X,), (X[:1],), (X[:0],), (torch.rand(2, 1, 4),), (torch.rand(1, 1, 4),)]),
    "strides": (hostile.broadcasts, [(X,), (torch.rand(4, 2, 3).transpose(0, 2),), (torch.rand(3, 4, 8)[..., ::2],)]),
    "classes of arguments": (hostile.dispatches_on_class, [(X,), ((X, X),), ([X],)]),
    "early return": (hostile.returns_early, [(X,), (X, {"skip": True}), (X, {"skip": False}), (X, {}), (X, {"a": X})]),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_is_computed(name: str) -> None:
    forward, calls = SAME[name]
    plain, twin, _ = pair(forward, *calls[0], flatten=True)
    for mode in (True, False):
        plain.train(mode), twin.train(mode)
        for args in calls:
            expected = outcome(plain, args, {})
            assert_equal(outcome(twin, args, {}), expected)


CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "global": (hostile.reads_global, lambda _: hostile.put(HERE, "SCALE", 5.0)),
    "global in a helper": (hostile.reads_global_in_helper, lambda _: hostile.put(HERE, "SCALE", 5.0)),
    "helper": (hostile.reads_global_in_helper, lambda _: hostile.put(HERE, "helper", hostile.other_helper)),
    "global table": (hostile.reads_global_table, lambda _: hostile.put(hostile.TABLE, "gain", 9.0)),
    "global object": (hostile.reads_global_object, lambda _: hostile.put(hostile.SETTINGS, "bias", 9.0)),
    "global tensor": (hostile.reads_global_tensor, lambda _: hostile.put(HERE, "TENSOR", torch.tensor(9.0))),
    "class attribute": (hostile.reads_class_attribute, lambda _: hostile.put(hostile.Base, "factor", 9.0)),
    "table": (hostile.reads_table, lambda m: m.table.update(gain=9.0)),
    "nested list": (hostile.reads_nested_list, lambda m: m.sizes[1].__setitem__(0, 9)),
    "attribute of an object": (hostile.reads_object, lambda m: setattr(m.rule, "gain", 9.0)),
    "function": (hostile.reads_function, lambda m: setattr(m, "fn", torch.sin)),
    "partial": (hostile.reads_partial, lambda m: m.part.keywords.update(negative_slope=0.9)),
    "new attribute": (hostile.asks_for_attribute, lambda m: setattr(m, "late", 1)),
    "new module": (hostile.asks_for_module, lambda m: setattr(m, "optional", nn.ReLU())),
    "tensor in a list": (hostile.reads_tensor_in_list, lambda m: m.tensors.__setitem__(0, torch.tensor(9.0))),
    "requires_grad": (hostile.asks_requires_grad, lambda m: m.fc.weight.requires_grad_(False)),
    "dtype": (hostile.asks_dtype, lambda m: m.double()),
    "another child": (hostile.reads_global, lambda m: setattr(m, "fc", nn.Identity())),
    "hook of a child": (
        hostile.twice,
        lambda m: m.fc.register_forward_hook(lambda module, args, out: out * 3) and None,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_tracing_select_another_variant(name: str) -> None:
    forward, change = CHANGES[name]
    plain, twin, _ = pair(forward, flatten=True)
    assert_equal(outcome(twin, (X,), {}), outcome(plain, (X,), {}))
    clone = copy.deepcopy(twin)
    assert_equal(outcome(clone, (X,), {}), outcome(plain, (X,), {}))  # a copy is not taken for a change
    with contextlib.ExitStack() as stack:
        for model in (plain, twin):
            done = change(model.below)
            if isinstance(done, contextlib.AbstractContextManager):
                stack.enter_context(done)
        given = X.double() if name == "dtype" else X
        expected = outcome(plain, (given,), {})
        assert_equal(outcome(twin, (given,), {}), expected)
    if "global" in name or name in ("helper", "class attribute"):
        assert_equal(outcome(twin, (X,), {}), outcome(plain, (X,), {}))


@pytest.mark.parametrize(
    ("forward", "problem"),
    [
        (hostile.counts, r"sets self\.count"),
        (hostile.counts_in_table, r"changes self\.table"),
        (hostile.logs, r"changes self\.sizes"),
        (hostile.recurses, "calls itself"),
        (hostile.counts_globally, r"changes the global name .*COUNT"),
        (hostile.logs_globally, r"changes the global name .*LOG"),
        (hostile.changes_list_argument, r"changes the argument 'x'"),
    ],
)
def test_a_forward_with_a_memory_is_refused(forward: Callable[..., Any], problem: str) -> None:
    args = ([X],) if forward is hostile.changes_list_argument else (X,)
    torch.manual_seed(0)
    sch = slapo.create_schedule(Enclosing(hostile.model(forward)()), example_inputs=args)
    below = sch.model.below
    before = copy.deepcopy((below.count, below.table, below.sizes))
    with pytest.raises(slapo.TraceError, match=problem):
        sch["below"].trace(flatten=True)
    assert (below.count, below.table, below.sizes) == before
    assert "forward" not in below.__dict__


class Settles(nn.Module):
    """What its first call finds out, later calls know."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.kind: str | None = None
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            self.kind = "first"
            x = x * 3
        if self.again:
            self.kind = None
        return x + 1


def test_recording_keeps_state_that_the_first_call_sets() -> None:
    sch = slapo.create_schedule(Enclosing(Settles(again=False)), example_inputs=(X,))
    sch["below"].trace(flatten=True)
    assert sch.model.below.kind == "first"
    assert_equal(sch.model(X), X + 1)  # as every call after the first


def test_state_set_at_every_call_is_refused_and_restored() -> None:
    sch = slapo.create_schedule(Enclosing(Settles(again=True)), example_inputs=(X,))
    with pytest.raises(slapo.TraceError, match=r"sets self\.kind"):
        sch["below"].trace(flatten=True)
    assert sch.model.below.kind is None


@pytest.mark.parametrize(
    ("forward", "other"),
    [(hostile.asks_batch_of_one, X[:1]), (hostile.asks_contiguous, torch.rand(4, 2, 3).transpose(0, 2))],
)
def test_a_decision_about_an_argument_is_a_guard(forward: Callable[..., Any], other: torch.Tensor) -> None:
    plain, twin, _ = pair(forward)
    assert_equal(outcome(twin, (X[:2],), {}), outcome(plain, (X[:2],), {}))
    with pytest.raises(slapo.GuardError):
        twin(other)


class Dropping(nn.Module):
    """Decides by a value, and leaves layers out by chance while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not (self.training and torch.rand([]) < 0.5):
                x = layer(x)
        return x


def test_layers_that_training_leaves_out_by_chance_are_traced() -> None:
    torch.manual_seed(0)
    model, x = Dropping(), torch.randn(2, 4)
    plain = copy.deepcopy(model)
    sch = slapo.create_schedule(model, example_inputs=(x,))
    for number in range(6):
        sch[f"layers.{number}"].trace()
    for training in (True, False):
        torch.manual_seed(1)
        expected = plain.train(training)(x)
        torch.manual_seed(1)
        assert torch.equal(sch.model.train(training)(x), expected)


class Counts(nn.Module):
    """What its methods set, they set anew in every forward of the model around."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: int | None = None

    def begin(self) -> None:
        self.factor = 1


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts, self.first, self.last = Counts(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts.begin()
        return self.last(self.first(x) * self.counts.factor)


def test_attribute_set_before_its_read_is_no_guard() -> None:
    """Of a stage, which is recorded once: in every copy of the model the attribute is None at first."""
    sch = slapo.create_schedule(Counting(), example_inputs=(torch.randn(2, 4),))
    sch["first"].pipeline_split()
    assert slapo.verify(sch).steps_verified == 1
