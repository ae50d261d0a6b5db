"""``replace`` with a match and a function: it computes the same, at every match, in every variant."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slapo_core as slapo
from slapo_graph import patterns
from tests.messages import Messages


class Block(nn.Module):
    """What the tests rewrite: a bias and an activation, and a dropout, a sum and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 8))
        self.drop, self.norm = nn.Dropout(0.25), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        hidden = F.gelu(self.up(x) + self.bias)
        return self.norm(self.drop(self.down(hidden) * scale) + x)  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias)


def biased(x: Any, bias: Any) -> Any:
    return F.gelu(x + bias)


CONSTANT = patterns.any_constant()
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, 3, 4)


def stack() -> tuple[nn.Module, nn.Module, slapo.Schedule]:
    """A model, its reference copy, and a schedule in which the blocks are traced."""
    model = Stack().double()
    untouched = copy.deepcopy(model)
    schedule = slapo.create_schedule(model, example_inputs=X)
    schedule["blocks.*"].trace()
    return model, untouched, schedule


def assert_same(model: nn.Module, untouched: nn.Module, *inputs: torch.Tensor, exact: bool = True) -> None:
    """Outputs and every gradient, in training and evaluation, for each of ``inputs``."""
    for training in (True, False):
        for x in inputs or (X, X[:1], X[:, :1].repeat(3, 5, 1)):
            results = []
            for each in (model, untouched):
                each.train(training).zero_grad()
                torch.manual_seed(1)
                given = x.clone().requires_grad_()
                out = each(given)
                (out * torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape)).sum().backward()
                named = each.named_parameters()
                results.append([out, given.grad, *(parameter.grad for _, parameter in sorted(named))])
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12)


def test_a_function_is_the_computation() -> None:
    model, untouched, schedule = stack()
    schedule["blocks.*"].replace(bias_gelu, biased)
    assert "bias_gelu = " in str(schedule["blocks.0"].graph)
    assert "torch._C._nn.gelu" not in str(schedule["blocks.0"].graph)
    assert_same(model, untouched)
    slapo.verify(schedule, X)


def test_root_step_rewrites_every_match() -> None:
    model, untouched, schedule = stack()
    schedule.replace(bias_gelu, schedule.find(biased))
    assert [record.path for record in schedule.records] == ["blocks.0", "blocks.1", ""]
    assert all("bias_gelu" in str(schedule[f"blocks.{number}"].graph) for number in range(2))
    assert_same(model, untouched)
    schedule.undo()
    assert not any("bias_gelu" in str(schedule[f"blocks.{number}"].graph) for number in range(2))


def test_a_group_gives_each_node_its_own_matches() -> None:
    model, untouched, schedule = stack()
    group = schedule["blocks.*"]
    group.replace(bias_gelu, group.find(biased))
    assert [len(record.primitive.match) for record in schedule.records[2:]] == [1, 1]  # type: ignore[attr-defined]
    assert_same(model, untouched)


def test_the_model_can_be_copied_and_pickled_and_the_schedule_replayed() -> None:
    model, untouched, schedule = stack()
    schedule["blocks.*"].replace(bias_gelu, lambda x, bias: F.gelu(x + bias))
    schedule["blocks.*"].checkpoint(lambda x, y: patterns.call_module("norm", patterns.call_module("drop", x) + y))
    assert_same(copy.deepcopy(model), untouched)
    assert_same(pickle.loads(pickle.dumps(model)), untouched)
    again = slapo.replay(copy.deepcopy(untouched), schedule.to_json(), example_inputs=X)
    assert [str(record) for record in again.records] == [str(record) for record in schedule.records]
    assert_same(again.model, untouched)


def test_replay_that_finds_another_number_of_matches_is_an_error(message: Messages) -> None:
    _, untouched, schedule = stack()
    schedule["blocks.0"].replace(bias_gelu, biased)
    saved = schedule.to_json().replace('"total": 1', '"total": 2')
    with pytest.raises(slapo.ReplayError) as caught:
        slapo.replay(untouched, saved, example_inputs=X)
    message(caught, "2 places at 'blocks.0'", "1 now")


def test_undo_and_redo_put_the_same_graphs_back() -> None:
    model, untouched, schedule = stack()
    before = schedule["blocks.0"].graph
    schedule["blocks.0"].replace(bias_gelu, biased)
    after = schedule["blocks.0"].graph
    with schedule.rewound(2):
        assert schedule["blocks.0"].graph is before
    assert schedule["blocks.0"].graph is after
    assert_same(model, untouched)
    schedule.undo()
    assert schedule["blocks.0"].graph is before
    assert_same(model, untouched)


def test_a_match_used_after_an_edit_names_the_step(message: Messages) -> None:
    _, _, schedule = stack()
    node = schedule["blocks.0"]
    match, *_ = node.find(biased)
    node.replace(bias_gelu, match)
    with pytest.raises(slapo.StaleError) as caught:
        node.replace(bias_gelu, match)
    message(caught, "#3 replace(bias_gelu, match=<1 match of the pattern biased>) at 'blocks.0'")
    schedule.undo()
    node.replace(bias_gelu, match)  # it is there again
    schedule.undo(to=0)
    with pytest.raises(slapo.StaleError) as caught:
        node.replace(bias_gelu, match)
    message(caught, "its trace was undone")


def test_other_matches_stay_valid() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(F.gelu(x + 1) + 2)

    model = Two()
    schedule = slapo.create_schedule(model, example_inputs=X)
    schedule.trace()
    first, second = schedule.find(lambda x, c=CONSTANT: F.gelu(x + c))
    schedule.replace(lambda x, c: F.gelu(x + c), first, name="one")
    schedule.replace(lambda x, c: F.gelu(x + c), second, name="two")
    assert "one(x, 1)" in str(schedule.root.graph)
    assert "two(one, 2)" in str(schedule.root.graph)
    torch.testing.assert_close(model(X), Two()(X), rtol=0, atol=0)


def test_several_matches_in_a_row_and_an_outside_user(message: Messages) -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = x + 1
            a = torch.relu(first)
            b = torch.relu(a + 1)
            c = torch.relu(b + 1)
            return c, first * 2

    model = Chain()
    schedule = slapo.create_schedule(model, example_inputs=X)
    schedule.trace()
    matches = schedule.find(lambda x: torch.relu(x + 1))
    assert len(matches) == 3
    schedule.replace(lambda x: torch.relu(x + 1), matches[1:])
    # The first match has two outputs: the sum is used outside.
    with pytest.raises(slapo.PreconditionError) as caught:
        schedule.replace(lambda x: torch.relu(x + 1), matches[0])
    message(caught, "tuple of 2")
    schedule.replace(lambda x: (x + 1, torch.relu(x + 1)), matches[0])
    assert_tuples_same(model(X), Chain()(X))


def assert_tuples_same(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_saved_schedule_holds_each_pattern_once() -> None:
    class Each(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(x + 1)

    schedule = slapo.create_schedule(nn.Sequential(Each(), Each(), Each()), example_inputs=X)
    schedule["*"].trace()
    schedule["*"].checkpoint(match=lambda x, c=CONSTANT: F.gelu(x + c))
    document = schedule.document()
    assert len(document["patterns"]) == 1
    again = nn.Sequential(Each(), Each(), Each())
    replayed = slapo.replay(again, json.loads(json.dumps(document)), example_inputs=X)
    assert [str(record.primitive) for record in replayed.records] == [str(r.primitive) for r in schedule.records]
    for number in (7, -1, "first"):
        changed = json.loads(json.dumps(document))
        changed["records"][3]["arguments"]["match"][0]["pattern"] = number
        with pytest.raises(slapo.ReplayError, match=r"step 4, core\.checkpoint"):
            slapo.replay(nn.Sequential(Each(), Each(), Each()), changed, example_inputs=X)


def dropped(x: Any, residual: Any) -> Any:
    return F.dropout(x) + residual


def test_a_replacement_must_use_the_p_and_the_mode_that_a_pattern_leaves_open(message: Messages) -> None:
    model, untouched, schedule = stack()
    with pytest.raises(slapo.PreconditionError) as refused:
        schedule["blocks.*"].replace(lambda x, residual: F.dropout(x, 0.25) + residual, dropped)
    message(refused, "(x, residual, p, training)")
    schedule["blocks.*"].replace(lambda x, residual, p, training: F.dropout(x, p, training) + residual, dropped)
    slapo.verify(schedule, X)
    for mode in (True, False):
        results = []
        for each in (model.train(mode), untouched.train(mode)):
            torch.manual_seed(1)
            results.append(each(X))
        torch.testing.assert_close(*results)


SDPA = F.scaled_dot_product_attention


def attention(value: Any, mask: Any, key: Any, query: Any) -> Any:
    return F.softmax((query / 2.0) @ key.mT + mask, dim=-1) @ value


def with_dropout(value: Any, mask: Any, key: Any, query: Any, p: Any = CONSTANT) -> Any:
    return F.dropout(attention(value, mask, key, query), p)


def test_a_function_in_c_takes_one_input_and_no_order_of_several_is_guessed(message: Messages) -> None:
    class Written(nn.Module):
        def forward(self, q: torch.Tensor, mask: torch.Tensor) -> Any:
            return torch.relu(F.dropout(attention(q * 3, mask, q + 1, q), 0.1))

    inputs = torch.randn(2, 5, 4), torch.randn(5, 5)
    schedule = slapo.create_schedule(Written(), example_inputs=inputs)
    schedule.trace()
    for new, pattern, words in (
        (SDPA, attention, "lambda value, mask, key, query:"),
        (SDPA, with_dropout, "lambda value, mask, key, query, p:"),
        (torch.add, lambda x, y: x + y, "lambda x, y:"),
    ):
        with pytest.raises(slapo.PreconditionError) as refused:
            schedule.replace(new, pattern)
        message(refused, words)
    schedule.replace(lambda value, mask, key, query: SDPA(query, key, value, mask), attention)
    results = []
    for model in (schedule.model, Written()):
        torch.manual_seed(0)
        results.append(model(*inputs))
    torch.testing.assert_close(*results)
    schedule.replace(torch.sigmoid, lambda x: torch.relu(x))
    assert "torch.sigmoid(" in str(schedule.root.graph)
