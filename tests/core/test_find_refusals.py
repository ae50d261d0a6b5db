"""What is no pattern, cannot be traced, or matches nothing, and what the messages say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_core import patterns
from slapo_core.errors import ArgumentError, TraceError
from slapo_core.graph.patterns.making import pattern_of
from tests.core.finding import Block, nearest_miss, traced

X, Y = torch.randn(2, 4), torch.randn(2, 4)
HERE = Path(__file__).name


def refused(pattern: Any) -> ArgumentError:
    with pytest.raises(ArgumentError) as error:
        pattern_of(pattern)
    return error.value


def test_find_on_untraced_nodes_says_what_to_write() -> None:
    schedule = slapo.create_schedule(nn.Sequential(Block(), Block()))
    with pytest.raises(TraceError) as error:
        schedule["0"].find(F.gelu)
    assert error.value.message == (
        "nothing at or below '0' is traced, so there is no graph to find the pattern gelu in"
    )
    assert error.value.hint == "sch['0'].trace() first"
    with pytest.raises(TraceError, match=r"nothing at or below the root is traced"):
        schedule.find(F.gelu)
    with pytest.raises(TraceError, match=r"nothing at or below '0', '1' is traced"):
        schedule["*"].find(F.gelu)


def branching(x: Any) -> Any:
    return x * 2 if x.sum() > 0 else x


def looping(x: Any) -> Any:
    return torch.stack([F.relu(row) for row in x])


def with_a_length(x: Any) -> Any:
    return x / len(x)


def with_a_value(x: Any) -> Any:
    return x * x.max().item()


def with_a_tensor(x: Any) -> Any:
    return x + X


def with_an_unused_call(x: Any) -> Any:
    torch.tanh(x)
    return F.relu(x)


def with_an_unused_argument(x: Any, y: Any) -> Any:
    return F.relu(x)


def with_an_error(x: Any) -> Any:
    return F.relu(x, unknown=1)


def giving_its_argument(x: Any) -> Any:
    return x


def giving_nothing(x: Any) -> Any:
    F.relu(x)


def writing_to_a_part(x: Any) -> Any:
    x[0] = 1
    return F.relu(x)


REFUSED = {
    branching: "branches on a value",
    looping: "loops over a value, whose length a pattern does not know",
    with_a_length: "needs a plain number where a value stands",
    with_a_value: "reads .item() of a value",
    with_a_tensor: "uses a tensor of its own",
    with_an_unused_call: "computes tanh",
    with_an_unused_argument: "does not use its argument 'y'",
    with_an_error: "cannot be traced: it raises TypeError: relu() got an unexpected keyword argument 'unknown'",
    giving_its_argument: "returns an argument as it is",
    giving_nothing: "returns None, which is not computed from its arguments",
    writing_to_a_part: "writes to a part of a value",
}


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: pattern.__name__)
def test_what_cannot_be_traced_says_where_and_what_to_write(pattern: Any) -> None:
    error = refused(pattern)
    assert error.message.startswith(f"the pattern {pattern.__name__} {REFUSED[pattern]}")
    line = pattern.__code__.co_firstlineno
    assert any(f"{HERE}:{line + more})" in error.message for more in range(4)), error.message
    assert error.hint


@pytest.mark.parametrize("value", [3, None, "", nn.Linear, [F.relu], lambda *x: F.relu(x[0])])
def test_what_is_no_pattern_is_refused(value: Any) -> None:
    assert refused(value).hint


def test_words_of_the_language_belong_inside_of_a_pattern() -> None:
    for word in (lambda: patterns.any_op(1), lambda: patterns.call_module("a"), lambda: patterns.capture("a", 1)):
        with pytest.raises(ArgumentError, match="belong inside of a pattern's function"):
            word()
    with pytest.raises(ArgumentError, match="any_of needs alternatives"):
        patterns.any_of()
    with pytest.raises(ArgumentError, match="where needs a function of a node"):
        patterns.where(3)  # type: ignore[arg-type]
    assert "captures 'a' twice" in refused(lambda x: patterns.capture("a", patterns.capture("a", F.relu(x)))).message
    assert "capture needs a value" in refused(lambda x: patterns.capture("a", 3) + x).message
    assert "capture needs a name" in refused(lambda x: patterns.capture("a b", F.relu(x))).message


def test_a_pattern_that_was_refused_leaves_nothing_behind() -> None:
    refused(branching)
    refused(with_an_error)
    assert type(torch.relu(X)) is torch.Tensor
    assert torch.equal(nn.Identity()(X), X)
    with pytest.raises(ArgumentError, match="belong inside"):
        patterns.any_op(1)


# -- the nearest miss ----------------------------------------------------------------------------------------------


def graph(x: torch.Tensor, y: torch.Tensor, dense: nn.Module) -> Any:
    total = dense(x) + y
    return torch.softmax(F.gelu(total), dim=0)


LINE = graph.__code__.co_firstlineno

MISSES = {
    "1 of 2 calls of the pattern is there ('add'), but 'add' (HERE+1) goes into gelu, where the pattern has silu": (
        lambda x, y: F.silu(x + y)
    ),
    "1 of 2 calls of the pattern is there ('gelu'), but 'add' (HERE+1) calls add, where the pattern has mul": (
        lambda x, y: F.gelu(x * y)
    ),
    "'softmax' (HERE+2) has dim=0, where the pattern has -1": lambda x: torch.softmax(x, -1),
    "'gelu' (HERE+2) has approximate='none', where the pattern has 'tanh'": lambda x: F.gelu(x, approximate="tanh"),
    "2 of 3 calls of the pattern are there ('add' and 'gelu'), but 'dense' (HERE+1) calls linear, where the pattern "
    "has relu": lambda x, y: F.gelu(F.relu(x) + y),
    "2 of 2 calls of the pattern are there ('add' and 'gelu'), but 'x' would have to be different values in different "
    "places": lambda x: F.gelu(x + x),
    "no call of erf is in the graph, which calls linear, add, gelu and softmax": torch.erf,
    "self.dense.weight has shape (4, 4), the pattern's 'weight' (8, 4)": nn.Linear(4, 8),
    "'dense' (HERE+1) has bias=self.dense.bias, the pattern has not": F.linear,
    "'dense' (HERE+1) is given 1 value, the pattern has 2": lambda x, y: patterns.call_module("dense", x, y),
}


def test_the_nearest_miss_says_which_call_differs_and_how() -> None:
    schedule = traced(graph, X, Y, dense=nn.Linear(4, 4))
    for expected, pattern in MISSES.items():
        for more in (1, 2):
            expected = expected.replace(f"HERE+{more}", f"{HERE}:{LINE + more}")
        assert nearest_miss(schedule, pattern) == expected
