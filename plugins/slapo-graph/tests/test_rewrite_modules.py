"""``replace`` with a match: modules as children, arguments, outputs, and everything that does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slapo_core as slapo
from slapo_graph import patterns
from slapo_testing import ModelSnapshot, assert_bit_identical
from tests.messages import Messages

from .test_rewrite_functions import Stack, X, assert_same, bias_gelu, stack


class BiasGelu(nn.Module):
    """A parameter with a default that no match gives."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return F.gelu(x + bias) * scale


class OwnNorm(nn.Module):
    """The sum and the norm of a block, with a weight and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x + y, (4,), self.scale, self.shift)


def sum_norm(x: Any, y: Any) -> Any:
    return patterns.call_module("norm", x + y)


def test_a_module_becomes_a_child_under_a_visible_name() -> None:
    model, untouched, schedule = stack()
    schedule["blocks.0"].replace(BiasGelu(), lambda x, bias: F.gelu(x + bias))
    assert "self.bias_gelu(" in str(schedule["blocks.0"].graph)
    assert isinstance(schedule["blocks.0.bias_gelu"].module, BiasGelu)
    schedule["blocks.1"].replace(BiasGelu(), lambda x, bias: F.gelu(x + bias), name="act")
    assert isinstance(schedule["blocks.1.act"].module, BiasGelu)
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert_same(model, untouched)
    slapo.verify(schedule, X)
    schedule.undo(to=0)
    assert not hasattr(model.blocks[0], "bias_gelu")  # type: ignore[index]
    assert_same(model, untouched)


def test_names_are_made_unique() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.GELU()).double()
    untouched = copy.deepcopy(model)
    schedule = slapo.create_schedule(model, example_inputs=X)
    schedule.trace()
    first, second = schedule.find(nn.GELU())
    schedule.replace(nn.GELU(), first)
    schedule.replace(nn.GELU(), second)
    assert list(model._modules) == ["0", "1", "2", "gelu", "gelu_2"]
    assert_same(model, untouched)


def test_parameters_are_those_of_the_model(message: Messages) -> None:
    model, untouched, schedule = stack()
    node = schedule["blocks.0"]
    undeclared = refusal(schedule, lambda: node.replace(OwnNorm().double(), sum_norm))
    message(undeclared, "'scale' of the new module")
    node.replace(OwnNorm().double(), sum_norm, params={"norm.weight": "scale", "norm.bias": "shift"})
    block: Any = model.blocks[0]  # type: ignore[index]
    assert block.own_norm.scale is block.norm.weight
    assert_same(model, untouched)
    slapo.verify(schedule, X)
    engine = slapo.build(schedule)
    assert list(engine.state_dict()) == list(untouched.state_dict())


def test_the_models_own_module_can_be_called_instead() -> None:
    class Tied(nn.Module):
        def __init__(self, norm: nn.LayerNorm) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.norm(x + y)  # type: ignore[no-any-return]

    model, untouched, schedule = stack()
    schedule["blocks.0"].replace(Tied(model.blocks[0].norm), sum_norm)  # type: ignore[index, union-attr, arg-type]
    assert_same(model, untouched)


def test_several_outputs_are_a_tuple_in_the_graphs_order(message: Messages) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            a = torch.relu(x)
            return {"b": torch.tanh(a), "nested": (a * 2, [x + 1])}

    model = Two()
    schedule = slapo.create_schedule(model, example_inputs=X)
    schedule.trace()
    pattern = lambda x: torch.tanh(torch.relu(x))  # noqa: E731
    schedule.replace(lambda x: (torch.relu(x), torch.tanh(torch.relu(x))), pattern)
    out, expected = model(X), Two()(X)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    schedule.undo()
    text = refusal(schedule, lambda: schedule.replace(lambda x: torch.tanh(torch.relu(x)), pattern))
    message(text, "2 values", "tuple of 2")


def test_keyword_arguments_and_constants_reach_the_new_function(message: Messages) -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.softmax(q @ q.transpose(-1, -2) * 0.5 + mask, dim=-1) @ q

    def pattern(q: Any, scale: Any = SOME, *, mask: Any) -> Any:
        return torch.softmax(q @ q.transpose(-1, -2) * scale + mask, dim=-1) @ q

    def sdpa(q: torch.Tensor, *, mask: torch.Tensor, scale: float = 9.0, is_causal: bool = False) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, scale=scale, is_causal=is_causal)

    model, mask = Attention(), torch.linspace(0, 1, 9, dtype=torch.float64).reshape(3, 3)
    schedule = slapo.create_schedule(model, example_inputs={"q": X, "mask": mask})
    schedule.trace()
    schedule.replace(sdpa, pattern)
    assert "mask=mask, scale=0.5" in str(schedule.root.graph).replace(" = ", "=")
    torch.testing.assert_close(model(X, mask), Attention()(X, mask))
    torch.testing.assert_close(model(q=X, mask=mask), Attention()(X, mask))
    schedule.undo()
    text = refusal(schedule, lambda: schedule.replace(lambda q, mask: q, pattern))
    message(text, "lambda(q, mask)", "q, mask, scale")


SOME = patterns.any_constant()


def refusal(schedule: slapo.Schedule, step: Callable[[], Any]) -> str:
    """The text of the refusal of ``step``, after which everything is as before."""
    before, records = ModelSnapshot(schedule.model), schedule.records
    with pytest.raises((slapo.ApplyError, slapo.PreconditionError)) as caught:
        step()
    assert_bit_identical(before, ModelSnapshot(schedule.model))
    assert schedule.records == records
    return str(caught.value)


def other_shape(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias)[..., :4]


def other_type(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias).float()


def raising(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such kernel")


def three(x: Any, bias: Any, extra: Any) -> Any:
    return x


def swapped(bias: Any, y: Any) -> Any:
    return bias


def one(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("new", "word"),
    [
        (other_shape, "got float64[2, 3, 4]"),
        (other_type, "got float32[2, 3, 8]"),
        (raising, "RuntimeError: no such kernel"),
        (three, "three(x, bias, extra)"),
        (one, "one(x)"),
        (swapped, "swapped(bias, y)"),
        (BiasGelu, "got the class BiasGelu"),
        (3, "got int"),
        (None, "or a module"),
    ],
)
def test_mismatched_replacement_is_refused_and_changes_nothing(new: Any, word: str, message: Messages) -> None:
    _, _, schedule = stack()
    message(refusal(schedule, lambda: schedule["blocks.0"].replace(new, lambda x, bias: F.gelu(x + bias))), word)


def test_other_refusals(message: Messages) -> None:
    _, _, schedule = stack()
    node = schedule["blocks.0"]
    text = refusal(schedule, lambda: node.replace(bias_gelu, lambda x, bias: F.gelu(x * bias)))
    message(text, "no match for")
    text = refusal(schedule, lambda: node.replace(bias_gelu, []))
    message(text, "empty list")
    matches = schedule.find(lambda x, bias: F.gelu(x + bias))
    text = refusal(schedule, lambda: node.replace(bias_gelu, matches))
    message(text, "match 1 of 1 at 'blocks.1'")
    text = refusal(schedule, lambda: schedule.replace(bias_gelu, [matches[0], matches[0]]))
    message(text, "'add'")
    text = refusal(schedule, lambda: schedule.replace(bias_gelu, matches, drop="bias"))
    message(text, "drop=")
    text = refusal(schedule, lambda: schedule.replace(bias_gelu, matches, name="not a name"))
    message(text, "'not a name'")
    text = refusal(schedule, lambda: schedule.replace(OwnNorm().double(), schedule.find(sum_norm)))
    message(text, "2 modules at once")
    text = refusal(
        schedule,
        lambda: node.replace(OwnNorm().double(), sum_norm, params={"norm.weight": "scale", "up.weight": "shift"}),
    )
    message(text, "'up.weight'", "(8, 4)", "'shift'")
    untraced = slapo.create_schedule(Stack().double(), example_inputs=X)
    text = refusal(untraced, lambda: untraced["blocks.0"].replace(bias_gelu, lambda x, bias: F.gelu(x + bias)))
    message(text, "below 'blocks.0'")
    with pytest.raises(slapo.ArgumentError):
        node.replace(bias_gelu, lambda x: "no value of the graph")


def test_a_module_that_is_no_function_cannot_be_saved_but_a_lambda_as_pattern_can() -> None:
    _, _, schedule = stack()
    schedule["blocks.0"].replace(bias_gelu, lambda x, bias: F.gelu(x + bias))
    assert '"new_module": "plugins.slapo-graph.tests.test_rewrite_functions:bias_gelu"' in schedule.to_json()
    schedule["blocks.1"].replace(lambda x, bias: F.gelu(x + bias), lambda x, bias: F.gelu(x + bias))
    with pytest.raises(slapo.SerializationError, match=r"#4 .* a lambda"):
        schedule.to_json()


def test_another_variant_with_another_number_of_matches_is_an_error(message: Messages) -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(x + 1)
            return torch.relu(x + 1) if self.training else x

    model = Both()
    schedule = slapo.create_schedule(model, example_inputs=X)
    schedule.trace()
    schedule.replace(lambda x: torch.relu(x + 1), lambda x: torch.relu(x + 1), name="both")
    model(X)
    model.eval()
    with pytest.raises(slapo.TraceError) as caught:
        model(X)
    message(caught, "'both'", "2 places, and matches 1")
