"""Changes of a model between two calls: each is seen by a traced module that was called before, and its end too."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import slapo_core as slapo
from slapo_graph.graph import TracedForward
from tests.tiers import crossed

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
FACTOR = 2.0


class Config:
    kind = 1

    def __init__(self) -> None:
        self.slope, self.steps = 0.5, [1.0, 2.0]


class Inner(nn.Module):
    power = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 4), 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = getattr(self, "extra", None)
        y = self.fc(x) * self.scale * self.power
        y = y if self.training else y * 2
        return y if extra is None else y + extra


class Other(Inner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) - self.scale


class Block(nn.Module):
    bend = 2

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.norm = Inner(), nn.Dropout(0.5), nn.LayerNorm(4)
        self.many = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.gain, self.shift, self.config = nn.Parameter(torch.full((4,), 1.5)), 0.1, Config()
        self.register_buffer("mean", torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, mode: str = "a", **more: Any) -> Any:
        y = self.drop(self.inner(x)) * self.config.slope * self.config.kind + sum(self.config.steps) * self.bend
        for each in self.many:
            y = each(y) * FACTOR
        y = y * self.gain if self.gain.requires_grad and torch.is_grad_enabled() else y * 3
        y = y + self.mean if mask is None else y * mask + (1.0 if mask is x else 0.0)
        y = y * (1 if mask is None else 1 + mask.dim()) * (1 if mask is None or mask.dtype == X.dtype else 2)
        y = y + more["bias"] if more.get("bias") is not None else y
        y = y * 2 if torch.is_autocast_enabled("cpu") else y
        y = y + 1 if self.norm.weight.dtype == torch.float64 else y
        y = y + 1 if torch.get_default_dtype() == torch.float64 else y
        y = y + 1 if torch.is_inference_mode_enabled() else y
        y = y + self.shift
        return y + self.norm(y) if mode == "a" else y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> Any:
        return self.block(x)


Change = Callable[[Block], contextlib.AbstractContextManager[Any]]
CHANGES: dict[str, Change] = {}


def change(make: Callable[[Block], Iterator[None]]) -> Change:
    made = contextmanager(make)
    CHANGES[make.__name__] = made
    return made


def setting(name: str, of: Callable[[Any], Any], attribute: str, value: Any) -> None:
    """A change that sets an attribute of something, and sets it again as it was."""

    @contextmanager
    def made(block: Block) -> Iterator[None]:
        holder = of(block)
        had, before = attribute in vars(holder), getattr(holder, attribute)
        setattr(holder, attribute, value(block) if callable(value) else value)
        yield
        setattr(holder, attribute, before) if had or isinstance(before, nn.Module | nn.Parameter) else delattr(
            holder, attribute
        )

    CHANGES[name] = made


setting("an attribute", lambda block: block, "shift", 5.0)
setting("an attribute of another type", lambda block: block, "shift", 5)
setting("an attribute of a module below", lambda block: block.inner, "scale", 5.0)
setting("an attribute of an object", lambda block: block.config, "slope", 5.0)
setting("an object", lambda block: block, "config", lambda block: Slower())
setting("a list", lambda block: block.config, "steps", lambda block: [3.0])
setting("an attribute in the place of its class's", lambda block: block.inner, "power", 3.0)
setting("a forward", lambda block: block.inner, "forward", lambda block: lambda x: 7 * x)
setting("a module of another class", lambda block: block, "inner", lambda block: Other().to(X))
setting("a module of the same class", lambda block: block, "inner", lambda block: seeded(Inner))
setting("a module that is called", lambda block: block.inner, "fc", lambda block: seeded(lambda: nn.Linear(4, 4)))
setting("a parameter", lambda block: block, "gain", lambda block: nn.Parameter(torch.ones(4), requires_grad=False))
setting("a tied parameter", lambda block: block.many[0], "weight", lambda block: block.inner.fc.weight)
setting("no parameter", lambda block: block.inner.fc, "bias", None)


class Slower(Config):
    def __init__(self) -> None:
        super().__init__()
        self.slope = 0.125


class Sharper(Config):
    kind = 3


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make()


@change
def another_class(block: Block) -> Iterator[None]:
    block.inner.__class__ = Other
    yield
    block.inner.__class__ = Inner


@change
def evaluation(block: Block) -> Iterator[None]:
    block.eval()
    yield
    block.train()


@change
def evaluation_of_one(block: Block) -> Iterator[None]:
    block.drop.eval()
    yield
    block.drop.train()


@change
def evaluation_of_a_recorded_one(block: Block) -> Iterator[None]:
    block.inner.training = False
    yield
    block.inner.training = True


@change
def another_class_of_an_object(block: Block) -> Iterator[None]:
    block.config.__class__ = Sharper
    yield
    block.config.__class__ = Config


@change
def frozen_parameter(block: Block) -> Iterator[None]:
    block.gain.requires_grad_(False)
    yield
    block.gain.requires_grad_(True)


@change
def frozen_parameter_in_a_new_table(block: Block) -> Iterator[None]:
    table = block._parameters
    block._parameters = collections.OrderedDict(table)
    block.gain.requires_grad_(False)
    yield
    block.gain.requires_grad_(True)
    block._parameters = table


@change
def double(block: Block) -> Iterator[None]:
    block.double()
    yield
    block.float()


@change
def data_of_another_dtype(block: Block) -> Iterator[None]:
    block.gain.data = block.gain.data.double()
    block.norm.double()
    yield
    block.gain.data = block.gain.data.float()
    block.norm.float()


@change
def a_longer_list_of_modules(block: Block) -> Iterator[None]:
    block.many.append(seeded(lambda: nn.Linear(4, 4)))
    yield
    del block.many[2]


@change
def a_list_changed_in_place(block: Block) -> Iterator[None]:
    block.config.steps.append(3.0)
    yield
    block.config.steps.pop()


@change
def a_forward_hook(block: Block) -> Iterator[None]:
    handle = block.inner.register_forward_hook(lambda module, args, out: out * 2)
    yield
    handle.remove()


@change
def a_forward_pre_hook_of_what_is_called(block: Block) -> Iterator[None]:
    handle = block.inner.fc.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    yield
    handle.remove()


@change
def a_backward_hook(block: Block) -> Iterator[None]:
    handle = block.inner.register_full_backward_hook(lambda module, given, out: (given[0] * 2,))
    yield
    handle.remove()


@change
def a_hook_in_a_new_table(block: Block) -> Iterator[None]:
    block.inner._forward_hooks = collections.OrderedDict()
    handle = block.inner.register_forward_hook(lambda module, args, out: out * 2)
    yield
    handle.remove()


@change
def a_compiled_module(block: Block) -> Iterator[None]:
    runs: list[Any] = []
    block.inner.compile(backend=lambda graph, inputs: runs.append(0) or (lambda *args: [graph(*args)[0] * 2]))
    yield
    assert runs
    block.inner._compiled_call_impl = None
    del block.inner._compiled_call_impl


@change
def a_parametrized_module(block: Block) -> Iterator[None]:
    parametrize.register_parametrization(block.inner.fc, "weight", Halved())
    yield
    parametrize.remove_parametrizations(block.inner.fc, "weight", leave_parametrized=False)


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


@change
def an_attribute_of_the_class(block: Block) -> Iterator[None]:
    before, type(block).bend = type(block).bend, 4
    yield
    type(block).bend = before


@change
def a_global_name(block: Block) -> Iterator[None]:
    global FACTOR
    before, FACTOR = FACTOR, 3.0
    yield
    FACTOR = before


@change
def no_gradients(block: Block) -> Iterator[None]:
    with torch.no_grad():
        yield


@change
def autocast(block: Block) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


@change
def inference(block: Block) -> Iterator[None]:
    with torch.no_grad():
        block(X), block(X)
    with torch.inference_mode():
        yield


@change
def a_default_dtype(block: Block) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@change
def the_first_parameter_of_a_module(block: Block) -> Iterator[None]:
    block.inner.extra = nn.Parameter(torch.ones(4))
    yield
    del block.inner.extra


@change
def other_values(block: Block) -> Iterator[None]:
    before = {name: value.clone() for name, value in block.state_dict().items()}
    block.load_state_dict({name: value + 1 for name, value in before.items()})
    yield
    block.load_state_dict(before)


def pair(form: str) -> tuple[Model, Model, slapo.Schedule]:
    """A model, and the same one traced."""
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    sch = slapo.create_schedule(model, example_inputs=X)
    sch["block"].trace(flatten=form == "flat")
    if form == "checkpointed":
        sch["block"].checkpoint()
    return plain, model, sch


def run(model: Model, *args: Any, **kwargs: Any) -> list[Any]:
    """The result of the block, and the gradients of its input and of its parameters."""
    model.zero_grad()
    torch.manual_seed(1)
    x = X.to(next(model.block.norm.parameters()).dtype if model.block.gain.dtype == torch.float64 else X.dtype)
    if model.block.inner.fc.weight.dtype != torch.float64:
        x = X
    x = x.clone().requires_grad_()
    out = model.block(x, *args, **kwargs)
    if out.requires_grad:
        out.float().square().sum().backward()
    return [out, x.grad, *(parameter.grad for parameter in model.parameters())]


def assert_same(mine: list[Any], other: list[Any]) -> None:
    assert len(mine) == len(other)
    for one, two in zip(mine, other, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            assert one.dtype == two.dtype
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize(("name", "form"), crossed(CHANGES, ["traced", "flat", "checkpointed"]))
def test_a_change_between_two_calls_is_seen(name: str, form: str) -> None:
    plain, model, _ = pair(form)
    for _ in range(3):
        assert_same(run(model), run(plain))
    with CHANGES[name](plain.block):
        expected = [run(plain), run(plain)]
    with CHANGES[name](model.block):
        found = [run(model), run(model)]
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    for _ in range(2):
        assert_same(run(model), run(plain))


class Doubling:
    """As steps put them on modules: a graph may hold it."""

    slapo_is_inlined = True

    def __call__(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * 2


def test_hook_beside_an_inlined_one_changes_the_variant() -> None:
    torch.manual_seed(0)
    plain = Model()
    plain.block.inner.register_forward_hook(Doubling())
    model = copy.deepcopy(plain)
    sch = slapo.create_schedule(model, example_inputs=X)
    sch["block"].trace(flatten=True)
    assert "inner" not in sch["block"].graph.called
    for _ in range(3):
        assert_same(run(model), run(plain))
    handles = [one.block.inner.register_forward_hook(lambda module, args, out: out + 1) for one in (model, plain)]
    for _ in range(2):
        assert_same(run(model), run(plain))
    for handle in handles:
        handle.remove()
    for _ in range(2):
        assert_same(run(model), run(plain))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Inner(), Inner()
        self.other.fc.weight = self.one.fc.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=self.training):
            y = self.other(self.one(x))
        return y.float() * (2 if self.one.fc.weight is self.other.fc.weight else 1)


@pytest.mark.parametrize("flatten", [False, True])
def test_a_tie_that_ends_and_the_dtype_of_a_region_are_seen(flatten: bool) -> None:
    model = nn.Sequential(Tied())
    plain = copy.deepcopy(model)
    slapo.create_schedule(model, example_inputs=X)["0"].trace(flatten=flatten)
    before = torch.get_autocast_dtype("cpu")
    for dtype in (before, torch.float16, before):
        torch.set_autocast_dtype("cpu", dtype)
        try:
            for _ in range(3):
                assert torch.equal(model(X), plain(X))
        finally:
            torch.set_autocast_dtype("cpu", before)
    for one in (model, plain):
        one[0].other.fc.weight = nn.Parameter(one[0].one.fc.weight.detach() * 2)
    for _ in range(3):
        assert torch.equal(model(X), plain(X))


@pytest.mark.parametrize("form", ["traced", "flat"])
def test_each_input_signature_gets_its_graph(form: str) -> None:
    plain, model, _ = pair(form)
    ones, wide = torch.arange(4.0), torch.ones(2, 4)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        ((ones,), {}),
        ((wide,), {}),
        ((), {"mask": ones}),
        ((), {"mode": "b", "mask": ones}),
        ((), {"mask": ones, "mode": "b"}),
        ((), {"bias": ones}),
        ((), {"mask": wide, "bias": None}),
        ((), {"mask": None, "bias": wide}),
        ((ones,), {"bias": wide, "mode": "b"}),
        ((ones.double(),), {"mode": "b"}),
    ]
    for args, kwargs in [*calls, *calls, *reversed(calls)]:
        assert_same(run(model, *args, **kwargs), run(plain, *args, **kwargs))
    for one in (model, plain):  # two arguments that are one tensor
        one.block.eval()
    for _ in range(2):
        assert torch.equal(model.block(X, X), plain.block(X, X))
        assert torch.equal(model.block(X, X.clone()), plain.block(X, X.clone()))


def test_missing_module_is_refused_after_right_calls() -> None:
    plain, model, _ = pair("traced")
    for _ in range(2):
        assert_same(run(model), run(plain))
    with pytest.raises(TypeError):
        model.block()
    with pytest.raises(TypeError):
        model.block(X, x=X)


@pytest.mark.parametrize("form", ["traced", "flat"])
def test_repeated_call_searches_no_variant(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, _ = pair(form)
    for _ in range(2):
        model.train(), run(model), model.eval(), run(model)
    looked: list[int] = []
    variant = TracedForward.variant
    monkeypatch.setattr(TracedForward, "variant", lambda *args: looked.append(0) or variant(*args))
    for _ in range(2):
        model.train(), run(model), model.eval(), run(model)
        model.block.gain.data = torch.zeros(4)
    assert not looked
    model.block.shift = 3.0
    run(model)
    assert looked


def test_copies_have_snapshots_of_their_own_and_are_freed() -> None:
    plain, model, _ = pair("traced")
    twin, reference = copy.deepcopy(model), copy.deepcopy(plain)
    reference.block.shift = twin.block.shift = 3.0
    for _ in range(3):
        assert_same(run(model), run(plain))
        assert_same(run(twin), run(reference))
    held = weakref.ref(twin.block.inner.fc.weight)
    del twin
    gc.collect()
    assert held() is None
    assert_same(run(model), run(plain))
