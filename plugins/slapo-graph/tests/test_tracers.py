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
from slapo_core.plugins import Registry, current_registry, use_registry
from slapo_graph.protocol import Flag, Guard, Recorded, Untraceable, check
from tests.messages import Messages

X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


class Plain(nn.Module):
    """Has a child, a buffer, random numbers and regions."""

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


def traced(module: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module, slapo.Schedule]:
    torch.manual_seed(0)
    plain = nn.Sequential(module)
    model = copy.deepcopy(plain)
    sch = slapo.create_schedule(model, example_inputs=X)
    sch["0"].trace(**options)
    return plain, model, sch


def results(model: nn.Module, *args: Any) -> list[Any]:
    model.zero_grad()
    torch.manual_seed(2)
    out = model[0](*args)  # type: ignore[index]
    parts = [out["y"], *out["more"]] if isinstance(out, dict) else [out]
    sum(part.square().sum() for part in parts).backward()
    return [*parts, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


def test_the_graph_gives_what_the_forward_gives_and_holds_to_what_it_assumed() -> None:
    plain, model, sch = traced(Plain(), tracer="record", flatten=True)
    for mode in (True, False):
        plain.train(mode), model.train(mode)
        for args in ((X,), (torch.cat([X, X]),), (X, torch.tensor(3.0)), (X[:, :2],)):
            for one, other in zip(results(model, *args), results(plain, *args), strict=True):
                assert torch.equal(one, other)
    assert "self.fc(x)" in str(sch["0"].graph)
    for gain in (3.0, 2.0):
        plain[0].gain = model[0].gain = gain
        for one, other in zip(results(model, X), results(plain, X), strict=True):
            assert torch.equal(one, other)


class ByHand(slapo.Tracer):
    """A tracer that knows one model."""

    name = "byhand"

    def trace(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: Mapping[str, Any],
        leaves: Callable[[nn.Module, str], bool],
    ) -> Recorded:
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
    assert set(registry.names("tracers")) >= {"record"}
    sch = slapo.create_schedule(nn.Sequential(Plain()), example_inputs=X)
    with pytest.raises(slapo.UnknownNameError, match=r"'recrod'(?s:.)*'record'"):
        sch["0"].trace(tracer="recrod")
    with pytest.raises(slapo.UnusablePluginError) as caught:
        registry.register(type("Record", (ByHand,), {"name": "record"}), kind="tracers")
    message(caught, "'record'")
    assert sch.records == ()


def test_trace_without_inputs_names_the_missing_argument(message: Messages) -> None:
    sch = slapo.create_schedule(nn.Sequential(Plain()))
    with pytest.raises(slapo.ArgumentError, match="has no example inputs"):
        sch["0"].trace()
    sch["0"].trace(example_inputs=X)
    assert "def forward(self, x):" in str(sch["0"].graph)
