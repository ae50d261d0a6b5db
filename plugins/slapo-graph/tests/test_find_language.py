"""The words of the pattern language, and the forms that a pattern may have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_core.errors import ArgumentError, UnknownNameError
from slapo_graph import patterns
from slapo_graph.patterns import any_constant, any_of, any_op, call_module, capture, optional, where
from slapo_graph.patterns.definition import pattern_of
from tests.messages import Messages

from .finding import found, total, traced

ANY = any_constant()
X, Y = torch.randn(2, 4), torch.randn(2, 4)


def feed_forward(x: torch.Tensor, up: nn.Module, down: nn.Module) -> Any:
    return down(F.dropout(F.gelu(up(x)), 0.1)) + x


@pytest.fixture
def schedule() -> slapo.Schedule:
    return traced(feed_forward, X, up=nn.Linear(4, 8), down=nn.Linear(8, 4))


def test_glob_matches_names_of_the_printed_graph(schedule: slapo.Schedule) -> None:
    assert "gelu = F.gelu(up)" in str(schedule.root.graph)
    assert "up = self.up(" in str(schedule.root.graph)
    for text in ("gelu", "*gelu*", "F.gelu", "torch._C._nn.gelu"):
        assert found(schedule, text) == [("gelu",)]
    assert found(schedule, "F.*") == [("gelu",), ("dropout",)]
    assert found(schedule, "linear") == found(schedule, "Linear") == [("up",), ("down",)]
    assert found(schedule, "up") == [("up",)]
    assert found(schedule, "nothing") == []
    (match,) = schedule.find("*gelu*")
    assert (match.inputs, match.outputs, match.captures) == (("up",), ("gelu",), {})


def test_a_regular_expression_is_searched_for_in_the_same_names(schedule: slapo.Schedule) -> None:
    assert found(schedule, re.compile("^(gelu|dropout)$")) == [("gelu",), ("dropout",)]
    assert found(schedule, re.compile("GELU")) == []
    assert found(schedule, re.compile("GELU", re.IGNORECASE)) == [("gelu",)]


def test_regular_expression_given_as_text_gets_a_hint(schedule: slapo.Schedule, message: Messages) -> None:
    nothing = schedule.find("^(gelu|dropout)$")
    assert nothing == []
    message(repr(nothing), "re.compile('^(gelu|dropout)$')")
    with pytest.raises(slapo.PreconditionError) as refused:
        schedule.checkpoint("gelu|dropout")
    message(refused, "re.compile('gelu|dropout')")
    assert "re.compile" not in repr(schedule.find("nothing"))


def test_where_filters_nodes_by_a_function(schedule: slapo.Schedule) -> None:
    def is_shared(node: fx.Node) -> bool:
        return node.op == "call_module" and len(node.users) == 1

    assert found(schedule, where(is_shared)) == [("up",), ("down",)]


def test_call_module_takes_modules_by_path_or_class(schedule: slapo.Schedule) -> None:
    assert found(schedule, lambda x: F.gelu(call_module("up", x))) == [("up", "gelu")]
    assert found(schedule, lambda x: call_module("Lin*", x)) == [("up",), ("down",)]
    assert found(schedule, lambda x: call_module("*", input=x)) == [("up",), ("down",)]
    assert found(schedule, lambda x: call_module("*", x, None)) == []
    assert found(schedule, lambda x: call_module("other", x)) == []


def test_call_module_takes_modules_of_any_class_with_their_arguments() -> None:
    class Attention(nn.Module):
        def forward(self, x: Any, mask: Any = None, scale: float = 1.0) -> Any:
            return x * scale, mask

    def graph(x: torch.Tensor, y: torch.Tensor, attention: nn.Module) -> Any:
        return attention(x, mask=y)[0] + x, attention(x)[0] - x

    schedule = traced(graph, X, Y, attention=Attention())
    ((first, _, last),) = found(schedule, lambda x, mask: call_module("attention", x, mask)[0] + x)
    assert (first, last) == ("attention", "add")
    assert len(schedule.find(lambda x: call_module("Attention", x))) == 1
    assert len(schedule.find(lambda x: call_module("Attention", x, mask=None))) == 1
    assert len(schedule.find(lambda x, m: call_module("Attention", x=x, mask=m))) == 1


def test_any_op_is_one_call_of_exactly_these_values(schedule: slapo.Schedule) -> None:
    assert found(schedule, lambda x: F.dropout(any_op(x), 0.1)) == [("gelu", "dropout")]
    assert found(schedule, lambda x, y: any_op(call_module("down", x), y)) == [("down", "add")]
    assert found(schedule, lambda x, y: any_op(y, call_module("down", x))) == []
    assert found(schedule, lambda x: any_op(call_module("down", x))) == []


def test_any_constant_matches_given_and_omitted_arguments(schedule: slapo.Schedule) -> None:
    def pattern(x: Any, p: Any = ANY, training: Any = ANY) -> Any:
        return F.dropout(x, p, training)

    (match,) = schedule.find(pattern)
    assert match.captures == {"x": "gelu", "p": ("constant", 0.1), "training": ("constant", True)}
    (match,) = schedule.find(lambda x: F.gelu(x, approximate=capture("how", any_constant())))
    assert match.captures["how"] == ("constant", "none")
    assert total(lambda x: x.view(any_constant()), lambda x: x.view(4, -1), X) == 0
    assert total(lambda x: x.view(any_constant(), -1), lambda x: x.view(4, -1), X) == 1
    assert total(lambda x, n=ANY: (x * n) + n, lambda x: (x * 2) + 2, X) == 1
    assert total(lambda x, n=ANY: (x * n) + n, lambda x: (x * 2) + 3, X) == 0


def test_a_dropout_without_p_is_any_and_captures_p_and_mode(schedule: slapo.Schedule) -> None:
    (match,) = schedule.find(lambda x: F.dropout(F.gelu(x)))
    assert match.captures == {"x": "up", "p": ("constant", 0.1), "training": ("constant", True)}
    assert found(schedule, lambda x: F.dropout(x, 0.5)) == []  # what the default is, given
    assert F.dropout.__defaults__ == (0.5, True, False)

    twice = lambda x, y: F.dropout(F.dropout(x, 0.2) + y, 0.3, False)  # noqa: E731
    (match,) = traced(twice, X, Y).find(lambda x, p: F.dropout(F.dropout(x) + p))
    assert match.captures == {
        "x": "getitem",
        "p": "getitem_1",
        "p_2": ("constant", 0.2),
        "training": ("constant", True),
        "p_3": ("constant", 0.3),
        "training_2": ("constant", False),
    }
    either = any_of(lambda x: F.dropout(F.gelu(x)), lambda x: F.dropout(F.relu(x)))
    assert [dict(alternative.captures).keys() for alternative in pattern_of(either).alternatives] == [
        {"x", "p", "training"}
    ] * 2


def test_a_default_of_a_parameter_is_that_constant(schedule: slapo.Schedule) -> None:
    assert found(schedule, lambda x, p=0.1: F.dropout(x, p)) == [("dropout",)]
    assert found(schedule, lambda x, p=0.2: F.dropout(x, p)) == []


def test_captures_name_results_inside_of_a_match(schedule: slapo.Schedule) -> None:
    (match,) = schedule.find(lambda x, p=ANY: F.dropout(capture("activation", F.gelu(x)), p))
    assert match.captures == {"x": "up", "p": ("constant", 0.1), "activation": "gelu"}


def test_optional_step_is_preferred() -> None:
    def pattern(x: Any, y: Any) -> Any:
        return optional(F.dropout, x, any_constant(), training=any_constant()) + y

    assert total(pattern, lambda x, y: F.dropout(x, 0.3) + y, X, Y) == 1
    schedule = traced(lambda x, y: (F.dropout(x, 0.3) + y, F.relu(x) + y), X, Y)
    assert found(schedule, pattern) == [("dropout", "add"), ("add_1",)]
    assert [len(alternative.steps) for alternative in pattern_of(pattern).alternatives] == [2, 1]
    schedule = traced(lambda x: (F.dropout(F.gelu(x), 0.1), F.gelu(x)), X)
    at_the_end = lambda x: optional(F.dropout, F.gelu(x), any_constant())  # noqa: E731
    assert found(schedule, at_the_end) == [("gelu", "dropout"), ("gelu_1",)]


def test_any_of_takes_patterns_and_within_patterns_values() -> None:
    schedule = traced(lambda x: (F.gelu(x) * 2, F.silu(x) * 2, F.relu(x) * 2), X)
    assert found(schedule, any_of("*gelu*", nn.SiLU(), any_of(re.compile("relu")))) == [("gelu",), ("silu",), ("relu",)]
    assert found(schedule, lambda x: any_of(F.gelu(x), F.silu(x)) * 2) == [("gelu", "mul"), ("silu", "mul_1")]

    def twice(x: Any) -> Any:
        activated = any_of(F.gelu(x), x.relu())
        return activated * torch.sigmoid(activated)  # one choice for both places

    assert total(twice, lambda x: F.gelu(x) * torch.sigmoid(F.relu(x)), X) == 0
    assert total(twice, lambda x: (lambda y: y * torch.sigmoid(y))(F.relu(x)), X) == 1


def test_public_names_are_there_as_an_attribute_too() -> None:
    assert slapo.patterns is patterns
    assert slapo.patterns.optional is optional


# -- patterns of plugins -------------------------------------------------------------------------------------------


class Activation(slapo.Pattern):
    """GELU or SiLU."""

    name = "mine.activation"

    def alternatives(self) -> Iterator[Any]:
        yield lambda x: F.gelu(x)
        yield nn.SiLU()


class Uneven(slapo.Pattern):
    """Alternatives with different captures."""

    name = "mine.uneven"

    def alternatives(self) -> Iterator[Any]:
        yield lambda x: F.gelu(x)
        yield lambda x, y: x + y


def load(name: str) -> Any:
    return {"mine.activation": Activation, "mine.uneven": Uneven}.get(name)


def test_a_pattern_of_a_plugin_is_found_by_its_name() -> None:
    pattern = pattern_of(any_of("mine.activation", F.relu), lambda name: Renamed if name == "mine.activation" else None)
    assert [alternative.steps[0].target.name for alternative in pattern.alternatives] == ["gelu", "silu", "relu"]
    assert pattern_of("mine.other", load).alternatives[0].steps[0].target.kind == "glob"


class Renamed(Activation):
    """GELU or SiLU, with the same captures."""

    def alternatives(self) -> Iterator[Any]:
        yield lambda input: F.gelu(input)
        yield nn.SiLU()


def test_alternatives_of_a_pattern_have_the_same_captures(message: Messages) -> None:
    with pytest.raises(ArgumentError) as error:
        pattern_of("mine.uneven", load)
    message(error, "'mine.uneven'", "alternative 2 has x and y, alternative 1 has x", "\n  hint: ")


def test_name_of_a_missing_plugin_is_not_a_glob(schedule: slapo.Schedule) -> None:
    with pytest.raises(UnknownNameError, match=r"megatron\.nothing"):
        schedule.find("megatron.nothing")
