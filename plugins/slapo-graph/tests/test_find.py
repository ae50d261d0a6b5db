"""What find finds: calls that are connected as in the pattern, with the same constants, once each."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_graph import patterns

from .finding import Block, Computes, found, total, traced

X, Y, Z = torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4)


# -- where the reference of 2024 went wrong ------------------------------------------------------------------------


def test_calls_that_are_not_connected_are_no_match() -> None:
    def pattern(p: Any, q: Any, r: Any) -> Any:
        return (p + q) * r

    assert total(pattern, lambda x, y, z: (x + y) * z, X, Y, Z) == 1
    assert total(pattern, lambda x, y, z: (x + y, x * z), X, Y, Z) == 0
    assert total(pattern, lambda x, y, z: (x - y) * z, X, Y, Z) == 0


def test_constants_matter_by_position_and_by_name() -> None:
    softmax = traced(lambda x: torch.softmax(x, dim=0), X)
    assert len(softmax.find(lambda x: F.softmax(x, dim=0))) == 1
    assert not softmax.find(lambda x: F.softmax(x, dim=-1))
    assert not softmax.find(lambda x: x.softmax(-1))
    assert not softmax.find(nn.Softmax(-1))


def test_each_call_takes_its_own_operand() -> None:
    def graph(x: torch.Tensor) -> Any:
        one, two = x + 1, x + 1
        return F.relu(two), one * 2

    assert found(traced(graph, X), lambda x: F.relu(x + 1)) == [("add_1", "relu")]


def test_partial_functions_are_patterns() -> None:
    softmax = traced(lambda x, y: (x.softmax(-1), y.softmax(0)), X, Y)
    assert found(softmax, functools.partial(F.softmax, dim=-1)) == [("softmax",)]
    assert found(softmax, functools.partial(torch.softmax, dim=0)) == [("softmax_1",)]
    assert found(softmax, functools.partial(lambda x, dim: x.softmax(dim), dim=0)) == [("softmax_1",)]
    scaled = traced(lambda x: x * 3, X)
    assert len(scaled.find(functools.partial(lambda scale, x: x * scale, 3))) == 1
    assert not scaled.find(functools.partial(lambda scale, x: x * scale, 4))


def test_an_intermediate_that_others_use_is_an_output() -> None:
    def graph(x: torch.Tensor, y: torch.Tensor) -> Any:
        total = x + y
        return F.gelu(total), total * 2

    (match,) = traced(graph, X, Y).find(lambda x, y: F.gelu(x + y))
    assert match.nodes == match.outputs == ("add", "gelu")


def test_matches_in_a_row_each_have_their_own_calls() -> None:
    def graph(x: torch.Tensor, y: torch.Tensor) -> Any:
        for _ in range(3):
            x = F.relu(x + y)
        return x

    assert found(traced(graph, X, Y), lambda x, y: F.relu(x + y)) == [
        ("add", "relu"),
        ("add_1", "relu_1"),
        ("add_2", "relu_2"),
    ]


def test_tensors_given_by_keyword_are_operands() -> None:
    def graph(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        return F.linear(input=x, weight=y, bias=z), F.linear(y, x)

    schedule = traced(graph, torch.randn(2, 4), torch.randn(3, 4), torch.randn(3))
    (match,) = schedule.find(lambda a, w, b: F.linear(a, w, b))
    assert match.nodes == ("linear",)
    assert len(match.inputs) == 3
    assert found(schedule, lambda a, w: F.linear(a, bias=None, weight=w)) == [("linear_1",)]


# -- operands ------------------------------------------------------------------------------------------------------


def test_a_wildcard_is_one_value_wherever_it_stands() -> None:
    schedule = traced(lambda x, y: (x * torch.sigmoid(x), x * torch.sigmoid(y)), X, Y)
    assert found(schedule, lambda x: x * torch.sigmoid(x)) == [("sigmoid", "mul")]
    assert len(schedule.find(lambda x, y: x * torch.sigmoid(y))) == 2  # two may be the same value


def test_a_wildcard_is_no_constant_and_no_value_of_the_match_itself() -> None:
    assert total(lambda x, y: x + y, lambda x: x + 1, X) == 0
    assert total(lambda x, y: F.relu(x) + y, lambda x: F.relu(x) + F.relu(x), X) == 1

    def own(x: torch.Tensor) -> Any:
        relu = F.relu(x)
        return relu + relu

    assert total(lambda x, y: F.relu(x) + y, own, X) == 0
    assert total(lambda x: F.relu(x) + F.relu(x), own, X) == 0  # two calls are two nodes
    assert total(lambda x: (lambda r: r + r)(F.relu(x)), own, X) == 1


def test_commutative_calls_match_in_either_order_and_no_others() -> None:
    def graph(x: torch.Tensor, y: torch.Tensor) -> Any:
        return y * F.relu(x), y - F.relu(x), y + F.relu(x) * 2

    schedule = traced(graph, X, Y)
    assert len(schedule.find(lambda x, y: F.relu(x) * y)) == 1
    assert not schedule.find(lambda x, y: F.relu(x) - y)
    assert len(schedule.find(lambda x, y: y - F.relu(x))) == 1
    assert (
        total(lambda x, y: torch.add(F.relu(x), y, alpha=2), lambda x, y: torch.add(y, F.relu(x), alpha=2), X, Y) == 0
    )


def test_numbers_are_the_same_only_where_they_compute_the_same() -> None:
    assert total(lambda x: x * 2, lambda x: x * 2.0, X) == 1
    whole = torch.ones(2, dtype=torch.int64)
    assert total(lambda x: x * 2, lambda x: x * 2.0, whole) == 0
    assert total(lambda x: x * 1, lambda x: x * True, whole) == 0


def test_axes_are_counted_in_the_tensor_that_they_are_axes_of() -> None:
    assert total(lambda x: x.unsqueeze(-1), lambda x: x.unsqueeze(1), X) == 0
    assert total(lambda x: x.unsqueeze(-1), lambda x: x.unsqueeze(2), X) == 1
    assert total(lambda x: x.squeeze(-1), lambda x: x.squeeze(1), X) == 1
    assert total(lambda x, y: torch.stack([x, y], -1), lambda x, y: torch.stack([x, y], 1), X, Y) == 0
    assert total(lambda x: torch.diag_embed(x, dim1=-3), lambda x: torch.diag_embed(x, dim1=1), X) == 0


def test_a_call_that_writes_in_place_is_another_call() -> None:
    def graph(x: torch.Tensor, y: torch.Tensor) -> Any:
        total = x * 1
        total += y
        return F.relu(total, inplace=True)

    schedule = traced(graph, X, Y)
    assert not schedule.find(lambda x, y: x + y)
    assert not schedule.find(F.relu)
    assert len(schedule.find(lambda x: F.relu(x, inplace=True))) == 1
    assert len(schedule.find(lambda x: x.relu_())) == 1
    assert len(schedule.find(lambda x, y: x.add_(y))) == 1


def test_parts_of_results_are_operands_too() -> None:
    def halves(x: Any) -> Any:
        one, two = x.chunk(2, dim=-1)
        return F.silu(one) * two

    ((chunk, one, two, *rest),) = found(traced(halves, X), halves)
    assert (chunk, rest) == ("chunk", ["silu", "mul"])
    assert {name.partition("_")[0] for name in (one, two)} == {"getitem"}

    def crossed(x: Any) -> Any:
        one, two = x.chunk(2, dim=-1)
        return F.silu(two) * one

    assert total(halves, crossed, X) == 0
    assert total(halves, halves, X) == 1


def test_sizes_are_operands_too() -> None:
    def rotated(x: Any) -> Any:
        one, two = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-two, one), dim=-1)

    assert total(rotated, rotated, X) == 1
    assert total(rotated, lambda x: torch.cat((-x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]), -1), X) == 0
    assert total(lambda x: x.view(x.shape[0] * x.shape[1]), lambda x: x.view(x.shape[0] * x.shape[0]), X[:, :2]) == 0


def test_patterns_with_several_results() -> None:
    def graph(x: torch.Tensor, query: nn.Module, key: nn.Module, value: nn.Module) -> Any:
        return query(x), key(x), value(F.relu(x))

    modules = {name: nn.Linear(4, 4) for name in ("query", "key", "value")}
    schedule = traced(graph, X, **modules)

    def two(x: Any, v: Any, b: Any, w: Any, c: Any) -> Any:
        return F.linear(x, v, b), F.linear(x, w, c)

    (match,) = schedule.find(two)
    assert match.nodes == match.outputs == ("query", "key")
    assert match.inputs == (match.inputs[0], "self.query.weight", "self.query.bias", "self.key.weight", "self.key.bias")
    assert not schedule.find(lambda x, a, b, c: (F.linear(x, a), F.linear(x, b), F.linear(x, c)))


# -- overlaps ------------------------------------------------------------------------------------------------------


def test_first_of_overlapping_matches_wins() -> None:
    def graph(x: torch.Tensor) -> Any:
        for _ in range(5):
            x = F.relu(x)
        return x

    assert found(traced(graph, X), lambda x: F.relu(F.relu(x))) == [("relu", "relu_1"), ("relu_2", "relu_3")]


def test_earlier_alternative_wins_at_one_node() -> None:
    schedule = traced(lambda x: F.dropout(F.gelu(x), 0.1), X)
    both, alone = (lambda x: F.dropout(F.gelu(x), 0.1)), F.gelu
    assert found(schedule, patterns.any_of(both, alone)) == [("gelu", "dropout")]
    assert found(schedule, patterns.any_of(alone, both)) == [("gelu",)]


# -- places --------------------------------------------------------------------------------------------------------


def test_groups_and_the_root_search_every_traced_node_below() -> None:
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(4, 4))
    schedule = slapo.create_schedule(model)
    for number in (0, 2):
        schedule[str(number)].trace(example_inputs=(X, Y))
    matches = schedule.find(lambda x, y: F.dropout(x, 0.1) + y)
    assert [(match.path, match.index, match.total) for match in matches] == [("0", 0, 1), ("2", 0, 1)]
    assert matches.untraced == ("1", "3")
    assert repr(matches) == (
        "<2 matches:\n"
        "  match 1 of 1 at '0': dropout, add\n"
        "  match 1 of 1 at '2': dropout, add\n"
        "  not searched, not traced: '1', '3'>"
    )
    assert [match.path for match in schedule["*"][1:3].find(Block())] == ["2"]
    assert schedule["0"].find(torch.sigmoid) == []
    assert repr(schedule["0"].find(torch.sigmoid)) == "<no matches>"


def test_in_a_traced_module_the_traced_ones_below_are_searched_too() -> None:
    model = Computes(lambda x, y, block: F.relu(block(x, y)), block=Block())
    schedule = slapo.create_schedule(model, example_inputs=(X, Y))
    schedule["block"].trace()
    schedule.trace()
    matches = schedule.find(patterns.any_of(F.relu, nn.LayerNorm(4)))
    assert [(match.path, match.nodes) for match in matches] == [("", ("relu",)), ("block", ("norm",))]
    assert matches.untraced == ()


def test_the_model_stays_as_it_is() -> None:
    model = Block().eval()
    schedule = traced(model, X, Y)
    before, steps = model(X, Y), len(schedule.records)
    schedule.find(Block())
    schedule.find("*")
    assert torch.equal(model(X, Y), before)
    assert len(schedule.records) == steps
