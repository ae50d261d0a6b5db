"""What rewritten graphs show in a training step, and that it is missing where another forward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo
from slapo_core import Edit
from slapo_graph.graph import TracedForward


class Layer(nn.Module):
    """Two GELUs behind biases, and parallel projections."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(x + self.bias)
        return F.gelu(self.query(y) * self.key(y) + self.bias)


def schedule() -> slapo.Schedule:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer()).double()
    sch: Any = slapo.create_schedule(model, example_inputs=torch.randn(2, 4, dtype=torch.float64))
    sch["*"].trace()
    return sch


def observed(sch: slapo.Schedule) -> slapo.Observation:
    return slapo.observe(sch, torch.randn(3, 4, dtype=torch.float64))


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def last_gelu(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x * y + bias)


class BiasGelu(nn.Module):
    """The same as a module."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return bias_gelu(x, bias)


STEPS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "function": (lambda sch: sch["*"].replace(bias_gelu, bias_gelu), "2 of 2 calls of bias_gelu"),
    "module": (lambda sch: [node.replace(BiasGelu(), bias_gelu) for node in (sch["0"], sch["1"])], "2 of 2 calls of"),
    "from_the_root": (lambda sch: sch.root.replace(bias_gelu, bias_gelu), "2 of 2 calls of bias_gelu"),
    "region": (lambda sch: sch["*"].checkpoint(bias_gelu), "2 recomputed forwards"),
    "merge": (lambda sch: sch["*"].merge(("query", "key")), "1 of 1 calls of query_key"),
}


@pytest.mark.parametrize("step", STEPS)
def test_each_call_that_a_step_put_into_a_graph_is_seen(step: str) -> None:
    sch = schedule()
    apply, words = STEPS[step]
    apply(sch)
    found = observed(sch)
    assert not found.missing
    assert [words in each.seen for each in found.findings] == [True, True]


@pytest.mark.parametrize("step", STEPS)
def test_they_are_missing_in_a_layer_whose_own_forward_runs(step: str) -> None:
    sch = schedule()
    STEPS[step][0](sch)
    layer = sch.model[1]
    if step == "merge":  # their weights are in the merged child
        layer.forward = lambda x: F.gelu(x + layer.bias)
    else:
        layer.forward = Layer.forward.__get__(layer)
    (missing,) = observed(sch).missing
    record = sch.records[-1]
    assert missing.source == str(record)
    assert "'1'" in str(missing)


@pytest.mark.parametrize("step", STEPS)
def test_they_are_missing_where_the_step_changed_nothing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sch = schedule()
    monkeypatch.setattr(TracedForward, "with_region_called", lambda self, *args, **kwargs: self)
    monkeypatch.setattr(TracedForward, "replaced", lambda self, *args, **kwargs: self)
    if step == "merge":
        monkeypatch.setattr(Edit, "set_parameter", lambda *args, **kwargs: None)
    STEPS[step][0](sch)
    found = observed(sch)
    assert len(found.missing) == 2


def test_what_a_later_step_took_into_its_region_is_no_alarm() -> None:
    sch = schedule()
    sch["*"].replace(F.gelu, lambda x: F.gelu(x))
    assert len(observed(sch).findings) == 2
    sch["*"].checkpoint(bias_gelu)
    found = observed(sch)
    assert not found.missing
    assert len(found.findings) == 2  # of the regions


def test_a_variant_that_a_watched_step_records_is_no_alarm() -> None:
    sch = schedule()
    sch.root.trace()
    sch["*"].replace(bias_gelu, bias_gelu)
    found = slapo.observe(sch, torch.randn(3, 5, 4, dtype=torch.float64))
    assert not found.missing
    assert len(found.findings) == 2


def test_two_steps_with_one_name_are_both_seen() -> None:
    sch = schedule()
    first, _ = sch["0"].find(bias_gelu)
    sch["0"].replace(bias_gelu, first)
    sch["0"].replace(last_gelu, last_gelu, name="bias_gelu")
    found = observed(sch)
    assert not found.missing
    assert len(found.findings) == 2
