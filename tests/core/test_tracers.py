"""Tracers are plugins: ours by name, anybody's through the registry, each refusing what it cannot say."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import fx, nn

import slapo_core as slapo
from slapo_core.plugins.process import current_registry, use_registry
from slapo_core.plugins.registry import Registry
from slapo_core.spec.tracer import Flag, Guard, Recorded, Untraceable, check
from tests.messages import Messages

X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


class Plain(nn.Module):
    """Simple enough for every tracer, with a child, a buffer, random numbers and regions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.gain = nn.Linear(8, 8), nn.Dropout(0.5), 2.0
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        left, right = self.drop(self.fc(x)).chunk(2, -1)
        self.steps += 1
        y = torch.cat([left * self.gain, right], -1) * self.weight + torch.arange(8)
        y[:, 0] *= 2
        return {"y": y if scale is None else y * scale, "more": (left,)}


class Sparse(nn.Module):
    """Shapes that follow from values: only torch.export says that."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        chosen = (y[:, 0, 0] > 0).nonzero().squeeze(-1)
        y = torch.zeros_like(y).index_add(0, chosen, y[chosen])
        return y * 2 if x.shape[1] > 3 else y


def traced(module: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module, slapo.Schedule]:
    torch.manual_seed(0)
    plain = nn.Sequential(module)
    model = copy.deepcopy(plain)
    sch = slapo.create_schedule(model, example_inputs=None if options.get("tracer") == "fx" else X)
    sch["0"].trace(**options)
    return plain, model, sch


def results(model: nn.Module, *args: Any) -> list[Any]:
    model.zero_grad()
    torch.manual_seed(2)
    out = model[0](*args)  # type: ignore[index]
    parts = [out["y"], *out["more"]] if isinstance(out, dict) else [out]
    sum(part.square().sum() for part in parts).backward()
    return [*parts, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("tracer", ["record", "fx", "export"])
def test_every_tracer_gives_what_the_forward_gives_and_holds_to_what_it_assumed(tracer: str, message: Messages) -> None:
    plain, model, sch = traced(Plain(), tracer=tracer, flatten=True)
    for mode in (True, False):
        plain.train(mode), model.train(mode)
        for args in ((X,), (torch.cat([X, X]),), (X, torch.tensor(3.0)), (X[:, :2],)):
            for one, other in zip(results(model, *args), results(plain, *args), strict=True):
                assert torch.equal(one, other)
    assert ("self.fc(x)" in str(sch["0"].graph)) == (tracer != "export")
    for gain in (3.0, 2.0):
        plain[0].gain = model[0].gain = gain
        for one, other in zip(results(model, X), results(plain, X), strict=True):
            assert torch.equal(one, other)


def test_export_takes_what_record_refuses_without_values_and_its_guards_hold(message: Messages) -> None:
    without = slapo.create_schedule(nn.Sequential(Sparse()).to("meta"), example_inputs=(X,))
    with pytest.raises(slapo.TraceError) as caught:
        without["0"].trace(tracer="record")
    message(caught, "tracer 'record'", "shape depends on values")
    plain, model, _ = traced(Sparse(), tracer="export", flatten=True)
    for x in (X, torch.cat([X, X]), -X):
        for one, other in zip(results(model, x), results(plain, x), strict=True):
            assert torch.equal(one, other)
    with pytest.raises(slapo.GuardError, match=r"torch\.export"):
        model(X[:, :2])
    model[0].fc.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(slapo.TraceError) as caught:
        model(X)
    message(caught, "'fc'", "hooked")


def test_export_refuses_calls_autocast_and_what_it_would_not_guard(message: Messages) -> None:
    with pytest.raises(slapo.PreconditionError) as caught:
        traced(Plain(), tracer="export")
    message(caught, "flatten=True, tracer='export'")
    _, model, _ = traced(Plain(), tracer="export", flatten=True)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(slapo.TraceError, match="autocast"):
        model(X)

    class Asks(Sparse):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) * (3 if x.is_contiguous() else 1)

    with pytest.raises(slapo.TraceError) as refused:
        traced(Asks(), tracer="export", flatten=True)
    message(refused, ".is_contiguous")
    assert refused.value.location == (__file__, Asks.forward.__code__.co_firstlineno + 1)


@pytest.mark.parametrize(
    ("forward", "problem"),
    [
        (lambda self, x: x if x.dtype is torch.float32 else -x, ".dtype"),
        (lambda self, x: x if x.shape[0] > 2 else -x, "branches"),
        (lambda self, x: sum(x), "iterates"),
        (lambda self, x: x * len(x), "value"),
        (lambda self, x: x * {3: 2}.get(x.dim(), 1), "value"),
        (lambda self, x: x if isinstance(self.fc(x), tuple) else -x, "class"),
        (lambda self, x: x * float(x.sum()), "value"),
        (lambda self, x: torch.ops.aten.add(x, 1), None),
    ],
)
def test_fx_refuses_whatever_it_would_have_to_know(forward: Any, problem: str | None, message: Messages) -> None:
    module = type("Asks", (Sparse,), {"forward": forward})()
    if problem is None:
        _, model, _ = traced(module, tracer="fx")
        assert torch.equal(model(X), X + 1)
        return
    with pytest.raises(slapo.TraceError) as refused:
        traced(module, tracer="fx")
    message(refused, problem)
    assert refused.value.location == (__file__, forward.__code__.co_firstlineno)
    assert "forward" not in module.__dict__


class ByHand(slapo.Tracer):
    """A tracer that knows one model."""

    name = "byhand"

    def trace(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: Mapping[str, Any] | None,
        leaves: Callable[[nn.Module, str], bool],
    ) -> Recorded:
        assert arguments is not None
        assert next(iter(inspect.signature(forward).parameters)) == "self"
        if not isinstance(module, nn.Linear):
            raise Untraceable("is no Linear", (__file__, 7), "trace a Linear")
        if module.in_features == 3:
            raise ValueError("three")
        graph = fx.Graph()
        x = graph.placeholder("input")
        graph.call_function(check, (graph.call_method("size", (x, -1)), module.in_features, 0))
        y = graph.call_function(nn.functional.linear, (x, graph.get_attr("weight"), graph.get_attr("bias")))
        graph.output(y)
        flag = Flag((), "out_features", module.out_features)
        return Recorded(graph, (Guard("the width", module.in_features, (__file__, 9)),), (flag,))


@pytest.fixture
def registry() -> Iterator[Registry]:
    with use_registry(Registry.discover(environ={})) as one:
        yield one


def test_a_tracer_of_a_plugin_is_used_by_its_name(registry: Registry, message: Messages) -> None:
    registry.register(ByHand, kind="tracers")
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(3, 3))
    sch = slapo.create_schedule(model, example_inputs=X)
    expected = model[0](X)
    sch["0"].trace(tracer="byhand")
    assert "F.linear(input_1, self.weight, self.bias)" in str(sch["0"].graph)
    assert torch.equal(model[0](X), expected)
    with pytest.raises(slapo.GuardError) as caught:
        model[0](X[..., :7])
    message(caught, "width == 8", "7")
    model[0].out_features = 5
    assert torch.equal(model[0](X), expected)
    assert len(sch["0"].graph.variants) == 2
    with pytest.raises(slapo.TraceError) as refused:
        sch["1"].trace(tracer="byhand", example_inputs=X)
    message(refused, "'1'", "'byhand'")
    assert (refused.value.location, refused.value.hint) == ((__file__, 7), "trace a Linear")
    with pytest.raises(slapo.TraceError) as caught:
        sch["2"].trace(tracer="byhand", example_inputs=X[..., :3])
    message(caught, "'byhand'", "ValueError: three")
    assert sch.undo() != ()
    assert "forward" not in model[0].__dict__


def test_names_of_tracers_are_resolved_like_all_others(registry: Registry, message: Messages) -> None:
    assert current_registry() is registry
    assert set(registry.names("tracers")) >= {"export", "fx", "record"}
    sch = slapo.create_schedule(nn.Sequential(Plain()), example_inputs=X)
    with pytest.raises(slapo.UnknownNameError, match=r"'recrod'(?s:.)*'record'"):
        sch["0"].trace(tracer="recrod")
    with pytest.raises(slapo.RejectedPluginError) as caught:
        registry.register(type("Auto", (ByHand,), {"name": "auto"}), kind="tracers")
    message(caught, "'auto'")
    assert sch.records == ()
    assert sch["0"].plugin("tracers", "fx").needs_inputs is False


def test_without_inputs_auto_takes_fx_and_says_so_where_that_refuses(message: Messages) -> None:
    plain = nn.Sequential(Plain())
    model = copy.deepcopy(plain)
    sch = slapo.create_schedule(model)
    sch["0"].trace()
    assert "def forward(self, x):" in str(sch["0"].graph)
    for one, other in zip(results(model, X), results(plain, X), strict=True):
        assert torch.equal(one, other)
    sch = slapo.create_schedule(nn.Sequential(Sparse()))
    with pytest.raises(slapo.TraceError) as caught:
        sch["0"].trace()
    message(caught, "tracer 'fx'", "'record' was not tried", "example_inputs=")
    for tracer in ("record", "export"):
        with pytest.raises(slapo.ArgumentError, match="has no example inputs"):
            sch["0"].trace(tracer=tracer, flatten=True)
