"""A traced module computes what it computed before, at other sizes, in other modes, and refuses what it cannot say."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from tests.messages import Messages


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 7 * gradient  # not what autograd would make of the forward


class Config:
    act = "gelu"

    def __init__(self) -> None:
        self.act = "gelu"


class Block(nn.Module):
    """What people write: sizes read and computed with, flags, optional arguments, regions, in-place operations."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.full((8,), 1.5))
        self.heads, self.dropout, self.config = 2, 0.25, Config()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, factor: float = 1.0, **extra: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=-1)
        )
        scores = q @ k.mT * factor / q.size(-1) ** 0.5
        if mask is not None:
            scores = scores + mask
        if self.config.act == "gelu":
            v = F.gelu(v)
        y = (F.dropout(scores.softmax(-1), self.dropout, self.training) @ v).transpose(1, 2).reshape(x.shape)
        with torch.no_grad():
            positions = torch.arange(length, device=x.device)
            if self.training:
                self.seen += 1
        y[:, 0] *= 2
        y = Doubled.apply(y * self.scale)
        return {"hidden": self.norm(1 - y), "more": (positions, extra.get("bias"))}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        return self.block(x, **more)


X = torch.randn(2, 5, 8)


def traced(**arguments: Any) -> slapo.Schedule:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Model().train(), example_inputs=X)
    sch["block"].trace(**arguments)
    return sch


def seen(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Outputs and gradients of one call."""
    model.zero_grad()
    torch.manual_seed(1)
    out = model(*args, **kwargs)
    out["hidden"].square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return (out["hidden"].detach(), *out["more"], *gradients)


def assert_same(model: nn.Module, untouched: nn.Module, *args: Any, **kwargs: Any) -> None:
    for mode in (True, False):
        mine, plain = seen(model.train(mode), *args, **kwargs), seen(untouched.train(mode), *args, **kwargs)
        assert len(mine) == len(plain)
        for a, b in zip(mine, plain, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b
    assert torch.equal(model.get_buffer("block.seen"), untouched.get_buffer("block.seen"))


@pytest.mark.parametrize("flatten", [False, True])
def test_a_traced_block_is_bit_identical_at_other_sizes_modes_types_and_arguments(flatten: bool) -> None:
    sch = traced(flatten=flatten)
    with sch.reference() as model:
        untouched = copy.deepcopy(model)
    assert "def forward(self" in str(sch["block"].graph)
    for args, kwargs in (
        ((X,), {}),
        ((torch.randn(1, 9, 8),), {}),
        ((torch.randn(3, 1, 8),), {"factor": 0.5}),
        ((torch.randn(3, 7, 8),), {"factor": 0.25}),
        ((torch.randn(4, 6, 8),), {"mask": torch.randn(6, 6)}),
        ((torch.randn(5, 8, 4).transpose(1, 2)[:, :, ::1],), {"bias": torch.ones(2)}),
    ):
        if args[0].shape[-1] == 8:
            assert_same(sch.model, untouched, *args, **kwargs)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(sch.model, untouched, X)
    sch.model.double(), untouched.double()
    assert_same(sch.model, untouched, X.double(), mask=torch.randn(5, 5).double())


def test_full_schedule_agrees_and_each_copy_runs_its_own_graph() -> None:
    sch = traced()
    sch["block"].checkpoint()
    assert slapo.verify(sch, X).steps_verified == 2
    model = sch.model.eval()
    expected = model(X)["hidden"]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X)["hidden"], expected)
        with torch.no_grad():
            twin.block.scale.mul_(2)
        assert not torch.equal(twin(X)["hidden"], expected)
        assert torch.equal(model(X)["hidden"], expected)
    again = slapo.replay(Model(), sch.to_json(), example_inputs=X)
    assert again["block"].graph is not None
    forward = model.block.__dict__["forward"]
    sch.undo(to=0)
    assert "forward" not in model.block.__dict__
    assert forward is not None
    assert sch["block"].graph is None
    assert torch.equal(model(X)["hidden"], expected)


class Branching(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.fc, self.calls = how, nn.Linear(8, 8), 0
        self.other = [nn.Linear(8, 8)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        if self.how == "value" and x.sum() > 0:
            return -x
        if self.how == "item":
            return x * x.max().item()
        if self.how == "attribute":
            self.calls = self.calls + 1
        if self.how == "outside":
            return self.other[0](x)
        if self.how == "size" and x.shape[1] > 4:
            return x.exp()
        if self.how == "loop":
            return sum(x[:, index].sum() for index in range(x.shape[1]))  # type: ignore[return-value]
        return x


@pytest.mark.parametrize(
    ("how", "word", "line"),
    [
        ("value", "(__bool__)", 'self.how == "value"'),
        ("item", "values of a tensor", "x.max().item()"),
        ("attribute", "self.calls", "self.calls = self.calls + 1"),
        ("outside", "a Linear", "self.other[0](x)"),
    ],
)
def test_unrecordable_code_is_refused_with_the_line_of_the_model(
    how: str, word: str, line: str, message: Messages
) -> None:
    model = nn.Sequential(Branching(how), nn.Linear(8, 8))
    sch = slapo.create_schedule(model, example_inputs=X)
    before = {name: value for name, value in model[0].__dict__.items() if not name.startswith("_")}
    with pytest.raises(slapo.TraceError) as refused:
        sch["0"].trace()
    message(refused, word)
    assert refused.value.location is not None
    file, number = refused.value.location
    assert file == __file__
    assert line in Path(file).read_text(encoding="utf-8").splitlines()[number - 1]
    assert (sch.records, type(model[0])) == ((), Branching)
    assert {name: value for name, value in model[0].__dict__.items() if not name.startswith("_")} == before


def test_a_decision_that_another_call_would_take_otherwise_is_an_error_with_its_line(message: Messages) -> None:
    sch = slapo.create_schedule(nn.Sequential(Branching("size")), example_inputs=X)
    sch["0"].trace()
    with torch.no_grad():
        expected = sch.model[0].fc(X).exp()
    assert torch.equal(sch.model(torch.cat([X, X])), torch.cat([expected, expected]))
    with pytest.raises(slapo.GuardError) as refused:
        sch.model(X[:, :3])
    message(refused, "fc.shape[1] > 4 == True", "False")
    assert refused.value.location is not None
    loop = slapo.create_schedule(nn.Sequential(Branching("loop")), example_inputs=X)
    loop["0"].trace()
    with pytest.raises(slapo.GuardError) as caught:
        loop.model(X[:, :3])
    message(caught, "fc.shape[1] == 5", "3")


def test_a_setting_that_has_changed_gets_a_graph_of_its_own() -> None:
    sch = traced()
    plain = copy.deepcopy(sch.model)
    del plain.block.forward
    sch.model.eval(), plain.eval()
    for setting in ("gelu", "relu", "gelu"):
        for model in (sch.model, plain):
            model.block.config.act = setting
        assert_same(sch.model, plain, X)
    assert len(sch["block"].graph.variants) == 4  # two settings, two modes


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.tensor(2.0)  # neither parameter nor buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_a_tensor_that_is_a_plain_attribute_is_read_at_every_call() -> None:
    sch = slapo.create_schedule(nn.Sequential(Scaled()), example_inputs=X)
    sch["0"].trace()
    assert torch.equal(sch.model(X), 2 * X)
    twin = copy.deepcopy(sch.model)
    sch.model[0].factor = torch.tensor(3.0)
    assert torch.equal(sch.model(X), 3 * X)
    assert torch.equal(twin(X), 2 * X)


def test_steps_below_stay_in_force_when_the_module_around_is_flattened() -> None:
    sch = slapo.create_schedule(Model(), example_inputs=X)
    sch["block.norm"].replace(nn.LayerNorm(8, eps=0.5))
    sch["block"].trace(flatten=True)
    with torch.no_grad():
        near = sch.model.eval()(X)["hidden"]
        sch.undo()
        assert torch.equal(near, sch.model(X)["hidden"])


class Biased(nn.Module):
    """The first layer makes a bias of its table, and the others get it, as in T5."""

    runs = Mock()

    class Layer(nn.Module):
        def __init__(self, table: bool) -> None:
            super().__init__()
            self.table = nn.Linear(8, 4) if table else None
            self.out = nn.Linear(4, 8)

        def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            if bias is None:
                assert self.table is not None
                bias = self.table(x)
            return x + self.out(bias), bias

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(table=index == 0) for index in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).runs()
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


def narrowed(sch: slapo.Schedule) -> None:
    sch["layers.0.table"].replace(nn.Linear(8, 2), drop=["weight", "bias"])
    for layer in sch["layers.*"]:
        layer["out"].replace(nn.Linear(2, 8), drop=["weight"])


def test_one_run_finds_the_scheduled_arguments_of_all_modules() -> None:
    sch = slapo.create_schedule(Biased(), example_inputs=X)
    sch["layers.*"].trace()
    assert [layer.graph.example[1] is None for layer in sch["layers.*"]] == [True, False, False, False]
    sch.undo(to=0)
    narrowed(sch)
    Biased.runs.reset_mock()
    sch["layers.*"].trace()
    assert [layer.graph.example[1].shape[-1] for layer in sch["layers.*"][1:]] == [2, 2, 2]
    assert Biased.runs.call_count == 1  # of the scheduled model; that of the reference model was before
    assert sch.model(X).shape == X.shape
    for layer in sch["layers.*"]:
        assert len(layer.graph.variants) == 1


def test_incomplete_schedule_names_its_unfinished_steps(message: Messages) -> None:
    sch = slapo.create_schedule(Biased(), example_inputs=X)
    sch["layers.0.table"].replace(nn.Linear(8, 2), drop=["weight", "bias"])
    sch["layers.2.out"].replace(nn.Linear(2, 8), drop=["weight"])
    with pytest.raises(slapo.TraceError) as told:
        sch["layers.2"].trace()
    message(told, "'layers.2' cannot be traced", "does not run as far as 'layers.2'", "trace(example_inputs=")
    assert sch["layers.2"].graph is None


def test_missing_example_inputs_error_shows_the_call(message: Messages) -> None:
    sch = slapo.create_schedule(Model())
    with pytest.raises(slapo.ArgumentError) as told:
        sch["block"].trace()
    message(told, "has no example inputs", "create_schedule(model, example_inputs=")
    sch["block"].trace(example_inputs=X)
    assert sch["block"].graph is not None
    with pytest.raises(slapo.PreconditionError, match="traced already"):
        sch["block"].trace(example_inputs=X)
    with pytest.raises(slapo.PreconditionError, match="flatten=True"):
        sch["block.norm"].trace(leaves=("x",), example_inputs=X)


def test_a_model_on_the_meta_device_is_traced_and_runs_when_it_has_values() -> None:
    with torch.device("meta"):
        model = Model()
    sch = slapo.create_schedule(model, example_inputs=X)
    sch["block"].trace()
    engine = slapo.build(sch, weights=Model().state_dict(), loss=lambda out, batch: out["hidden"].sum())
    assert torch.isfinite(engine.module(X)["hidden"]).all()


class KeyCache:
    def update(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = CachingLayer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, KeyCache())


class CachingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, past: KeyCache) -> torch.Tensor:
        return self.linear(past.update(x))


def test_trace_error_of_a_cache_suggests_use_cache() -> None:
    sch = slapo.create_schedule(Caching(), example_inputs=torch.zeros(2, 4))
    with pytest.raises(slapo.TraceError, match="KeyCache") as refused:
        sch["layer"].trace(flatten=True)
    assert "use_cache=False" in str(refused.value.hint)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return F.gelu(self.fc(x)) * scale


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.shared = Inner(), nn.Sequential(nn.Linear(8, 8), nn.GELU()), Inner()
        self.again = self.shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.shared(self.second(self.first(x, 2.0)), 3.0), 4.0)


def with_graphs(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if "forward" in module.__dict__]


def test_recursive_trace_covers_called_modules_and_undo_removes_all() -> None:
    model = nn.Sequential(Outer(), Outer()).double()
    x = X.double()
    untouched, expected = copy.deepcopy(model), model(x)
    sch = slapo.create_schedule(model, example_inputs=x)
    sch["0"].trace(recursive=True, leaves="second")
    assert with_graphs(model) == ["0", "0.first", "0.shared"]
    assert len(sch.records) == 1
    assert [match.path for match in sch.find(nn.GELU())] == ["0.first", "0.shared"]
    again = slapo.replay(untouched, sch.to_json(), example_inputs=x)
    assert with_graphs(untouched) == with_graphs(model)
    assert str(again["0.first"].graph) == str(sch["0.first"].graph)
    assert torch.equal(model(x), expected)
    slapo.verify(sch, x)
    sch.undo()
    assert with_graphs(model) == []
    sch["0.shared"].trace()
    sch["0"].trace(recursive=True)
    assert with_graphs(model) == ["0", "0.first", "0.second", "0.shared"]
    sch.undo()
    assert with_graphs(model) == ["0.shared"]


def test_recursive_flatten_traces_modules_that_stay_calls() -> None:
    model = nn.Sequential(Outer())
    model[0].first.register_forward_hook(lambda module, args, out: out + 1)
    expected = model(X)
    sch = slapo.create_schedule(model)
    sch["0"].trace(flatten=True, recursive=True, example_inputs=X)
    assert with_graphs(model) == ["0", "0.first"]
    assert torch.equal(model(X), expected)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.good, self.bad = Inner(), Branching("value")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bad(self.good(x, 2.0))


def test_untraceable_child_refuses_the_step_and_is_named() -> None:
    sch = slapo.create_schedule(nn.Sequential(Deep()), example_inputs=X)
    with pytest.raises(slapo.TraceError, match=r"'0\.bad' cannot be traced") as told:
        sch["0"].trace(recursive=True)
    assert "leaves=" in str(told.value)
    assert with_graphs(sch.model) == []
    sch["0"].trace(recursive=True, leaves=Branching)
    assert with_graphs(sch.model) == ["0", "0.good"]


@pytest.mark.parametrize("name", ["original", "recorded", "modules"])
def test_a_primitive_of_any_name_is_not_taken_for_the_schedule(isolated_registry: Any, name: str) -> None:
    class Named(slapo.Primitive):
        equivalence = slapo.Equivalence.EXACT

        def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
            edit.note("nothing")

    Named.name = f"acme.{name}"
    slapo.register_primitive()(dataclasses.dataclass(frozen=True)(Named))
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    sch = slapo.create_schedule(model, example_inputs=torch.ones(2, 4))
    sch["0"].trace()
    assert sch["0"].find("linear")
    slapo.verify(sch, torch.ones(2, 4))
