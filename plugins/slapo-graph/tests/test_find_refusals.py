"""What is no pattern, cannot be traced, or matches nothing, and what the messages say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_core.errors import ArgumentError, TraceError
from slapo_graph import patterns
from slapo_graph.patterns.definition import pattern_of
from tests.messages import Messages

from .finding import Block, nearest_miss, traced

X, Y = torch.randn(2, 4), torch.randn(2, 4)
HERE = Path(__file__).name


def refused(pattern: Any) -> ArgumentError:
    with pytest.raises(ArgumentError) as error:
        pattern_of(pattern)
    return error.value


def test_find_on_untraced_nodes_says_what_to_write(message: Messages) -> None:
    schedule = slapo.create_schedule(nn.Sequential(Block(), Block()))
    with pytest.raises(TraceError) as error:
        schedule["0"].find(F.gelu)
    message(error, "'0'", "gelu", "sch['0'].trace()")
    with pytest.raises(TraceError, match="below the root"):
        schedule.find(F.gelu)
    with pytest.raises(TraceError, match="below '0', '1'"):
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
    branching: "branches",
    looping: "loops",
    with_a_length: "plain number",
    with_a_value: ".item()",
    with_a_tensor: "a tensor",
    with_an_unused_call: "tanh",
    with_an_unused_argument: "'y'",
    with_an_error: "TypeError: relu()",
    giving_its_argument: "returns an argument",
    giving_nothing: "None",
    writing_to_a_part: "writes",
}


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: pattern.__name__)
def test_untraceable_pattern_names_line_and_hint(pattern: Any, message: Messages) -> None:
    error = refused(pattern)
    message(error, pattern.__name__, REFUSED[pattern])
    line = pattern.__code__.co_firstlineno
    assert any(f"{HERE}:{line + more})" in error.message for more in range(4)), error.message
    assert error.hint


@pytest.mark.parametrize("value", [3, None, "", nn.Linear, [F.relu], lambda *x: F.relu(x[0])])
def test_other_values_are_refused_as_patterns(value: Any) -> None:
    assert refused(value).hint


def test_words_of_the_language_belong_inside_of_a_pattern(message: Messages) -> None:
    for word in (lambda: patterns.any_op(1), lambda: patterns.call_module("a"), lambda: patterns.capture("a", 1)):
        with pytest.raises(ArgumentError, match="belong inside"):
            word()
    with pytest.raises(ArgumentError, match="any_of needs alternatives"):
        patterns.any_of()
    with pytest.raises(ArgumentError) as caught:
        patterns.where(3)  # type: ignore[arg-type]
    message(caught, "where needs")
    assert "captures 'a' twice" in refused(lambda x: patterns.capture("a", patterns.capture("a", F.relu(x)))).message
    assert "capture needs a value" in refused(lambda x: patterns.capture("a", 3) + x).message
    assert "capture needs a name" in refused(lambda x: patterns.capture("a b", F.relu(x))).message


def test_refused_pattern_restores_torch() -> None:
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

MISSES: dict[str, tuple[Any, int | None]] = {
    # a word of the message: the pattern, and the line of the call that the message names
    "use in silu": (lambda x, y: F.silu(x + y), 1),
    "wanted mul": (lambda x, y: F.gelu(x * y), 1),
    "dim=0": (lambda x: torch.softmax(x, -1), 2),
    "approximate='none'": (lambda x: F.gelu(x, approximate="tanh"), 2),
    "wanted relu": (lambda x, y: F.gelu(F.relu(x) + y), 1),
    "different values": (lambda x: F.gelu(x + x), None),
    "no call of erf": (torch.erf, None),
    "self.dense.weight": (nn.Linear(4, 8), None),
    "bias=self.dense.bias": (F.linear, 1),
    "0=a value 'x'": (lambda x, y: patterns.call_module("dense", x, y), 1),
}


def test_the_nearest_miss_says_which_call_differs_and_how(message: Messages) -> None:
    schedule = traced(graph, X, Y, dense=nn.Linear(4, 4))
    for word, (pattern, line) in MISSES.items():
        text = nearest_miss(schedule, pattern)
        message(text, word)
        assert line is None or f"({HERE}:{LINE + line})" in text
