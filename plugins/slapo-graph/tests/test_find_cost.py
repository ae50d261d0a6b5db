"""What find tries before it knows stays in proportion to graph and pattern, counted in placements, not in seconds."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from slapo_core.errors import ArgumentError
from slapo_graph.patterns import matcher
from slapo_graph.patterns.definition import pattern_of
from slapo_graph.patterns.index import indexed
from slapo_graph.patterns.matcher import embeddings
from tests.messages import Messages
from tests.tiers import crossed

NODES = 300


def tried(pattern: Callable[..., Any], graph: fx.Graph) -> tuple[int, int]:
    """How many matches there are, and how many placements were tried."""
    found, count = embeddings(pattern_of(pattern).alternatives, indexed(graph, nn.Module()))
    return len(found), count


def built(build: Callable[[fx.Graph, fx.Node], fx.Node]) -> fx.Graph:
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return graph


def chain(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """x + x, that + x, ..."""
    value = x
    for _ in range(NODES):
        value = graph.call_function(operator.add, (value, x))
    return value


def braid(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Each the sum of the two before it: every node is reached on very many ways."""
    values = [x, graph.call_function(operator.add, (x, x))]
    for _ in range(NODES):
        values.append(graph.call_function(operator.add, (values[-1], values[-2])))
    return values[-1]


def tree(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """A balanced tree of sums."""
    values = [graph.call_function(torch.tanh, (x,)) for _ in range(NODES // 2)]
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [graph.call_function(operator.add, pair) for pair in pairs]
    return values[0]


def fan(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """One value with very many users of one kind, and another value with one of another kind."""
    graph.call_function(torch.tanh, (graph.call_function(torch.neg, (x,)),))
    values = [graph.call_function(torch.relu, (x,)) for _ in range(NODES)]
    return values[-1]


def summed(*values: Any) -> Any:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def twelve_sums(a, b, c, d, e, f, g, h, i, j, k, m, n):
    return summed(a, b, c, d, e, f, g, h, i, j, k, m, n)


def ends_in_another_call(a, b, c, d, e, f, g, h, i, j, k, m):
    return torch.relu(summed(a, b, c, d, e, f, g, h, i, j, k, m))


def begins_with_another_call(a, b, c, d, e, f, g, h, i, j, k, m):
    return summed(torch.sigmoid(a), b, c, d, e, f, g, h, i, j, k, m)


def one_value_at_both_ends(x, b, c, d, e, f, g, h, i, j, k):
    return summed(x + x, b, c, d, e, f, g, h, i, j, k, x)


def far_apart(x, y, b, c, d, e, f, g, h, i, j):
    return summed(x, y, b, c, d, e, f, g, h, i, j, x)


def two_values_twice(x, y, b, c, d, e, f):
    return summed(x, y, b, x, c, d, y, e, f, x, y)


def balanced(a, b, c, d, e, f, g, h, i, j, k, m):
    return (((a + b) + (c + d)) + ((e + f) + (g + h))) + ((i + j) + (k + m))


def brothers(x):
    return *[torch.relu(x) for _ in range(11)], torch.tanh(x)


PATTERNS = [
    twelve_sums,
    ends_in_another_call,
    begins_with_another_call,
    one_value_at_both_ends,
    far_apart,
    two_values_twice,
    balanced,
]


@pytest.mark.parametrize(("pattern", "build"), crossed(PATTERNS, [chain, braid, tree]))
def test_sums_of_sums_are_found_or_not_in_proportionate_steps(pattern: Any, build: Any) -> None:
    count = tried(pattern, built(build))[1]
    assert count < 12 * 12 * NODES, count


def test_search_fails_fast_with_one_missing_sibling() -> None:
    assert tried(brothers, built(fan)) == (0, pytest.approx(NODES, abs=5 * NODES * 12))


def test_too_few_brothers_are_seen_without_trying_every_order() -> None:
    def few(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return [graph.call_function(torch.relu, (x,)) for _ in range(11)][-1]

    def twelve(x: Any) -> Any:
        return tuple(torch.relu(x) for _ in range(12))

    matches, count = tried(twelve, built(few))
    assert matches == 0
    assert count < 2**12  # 11! = 39,916,800 orders


def test_random_near_misses_are_cheap() -> None:
    def tangle(graph: fx.Graph, x: fx.Node) -> fx.Node:
        rng = random.Random(0)
        values = [x]
        for _ in range(NODES):
            values.append(
                graph.call_function(rng.choice((operator.add, operator.mul)), tuple(rng.choices(values[-6:], k=2)))
            )
        return values[-1]

    def near(x, y, z, u):
        total = x
        for value in (y, z, u, x, y, z, u, x, y, z, u):
            total = total + value * x
        return total

    assert tried(near, built(tangle))[1] < 12 * 12 * NODES


def test_exhausted_search_raises(monkeypatch: pytest.MonkeyPatch, message: Messages) -> None:
    monkeypatch.setattr(matcher, "MOST_STEPS", 100)
    with pytest.raises(ArgumentError) as error:
        tried(twelve_sums, built(chain))
    message(error, "too ambiguous", "\n  hint: ")


def test_the_count_sees_a_search_that_forgets_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(set):  # type: ignore[type-arg]
        def add(self, _: Any) -> None:
            pass

    before = tried(far_apart, built(braid))[1]
    init = matcher.AlternativeMatcher.__init__

    def forgetful(self: Any, *args: Any) -> None:
        init(self, *args)
        self._failed = Forgetful()

    monkeypatch.setattr(matcher.AlternativeMatcher, "__init__", forgetful)
    monkeypatch.setattr(matcher, "MOST_STEPS", 4 * before)
    with pytest.raises(ArgumentError):
        tried(far_apart, built(braid))
