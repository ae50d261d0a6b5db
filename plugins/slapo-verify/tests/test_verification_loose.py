"""What one step may be off by hides no mistake of another; and steps that need an approximate one are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo


class Scaled(nn.Linear):
    by = 1.001

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.by


class Near(Scaled):
    by = 1.0001


def of(kind: type[nn.Linear]) -> Any:
    def make(old: nn.Linear) -> nn.Linear:
        new = kind(old.in_features, old.out_features)
        new.load_state_dict(old.state_dict())
        return new

    return make


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4))


def loose(**tolerance: float) -> slapo.Schedule:
    sch = slapo.create_schedule(model())
    sch["0"].replace(of(Near), **(tolerance or {"rtol": 1e-2}))
    sch["1"].checkpoint()
    return sch


@pytest.mark.parametrize("tolerance", [{"rtol": 1e-2}, {"atol": 0.5}])
def test_a_mistake_that_the_tolerance_of_another_step_hides_is_found_and_blamed(tolerance: dict[str, float]) -> None:
    sch = loose(**tolerance)
    sch["3"].replace(of(Scaled))
    with pytest.raises(slapo.VerifyError, match="compared without #1") as e:
        slapo.verify(sch, torch.randn(5, 6))
    assert [step.partition("(")[0] for step in e.value.steps] == ["#3 replace"]
    assert e.value.tensor == "output"


def test_without_the_mistake_the_same_schedule_agrees_and_nothing_is_noted() -> None:
    sch = loose()
    sch["3"].checkpoint()
    assert slapo.verify(sch, torch.randn(5, 6)).notes == ()
    assert slapo.verify(sch, torch.randn(5, 6), rtol=1e-2).notes == ()


@pytest.mark.parametrize(
    ("tolerance", "percent"), [({"rtol": 4.0}, 400), ({"atol": 5.0}, None), ({"rtol": 0.09}, 0)], ids=str
)
def test_a_tolerance_of_a_tenth_of_the_largest_element_is_in_the_headline(
    tolerance: dict[str, float], percent: int | None
) -> None:
    torch.manual_seed(1)
    headline = str(slapo.verify(loose(**tolerance), torch.randn(5, 6))).splitlines()[0]
    says_nothing = "% of the largest element: the numbers say nothing about #1; without it, the rest agrees ("
    assert (says_nothing in headline) == (percent != 0)
    assert ("agrees with the reference model" in headline) == (percent == 0)
    assert f", within {percent or ''}" in headline or not percent


def test_a_wide_tolerance_given_to_verify_says_nothing_about_any_step() -> None:
    headline = str(slapo.verify(loose(), torch.randn(5, 6), rtol=0.3)).splitlines()[0]
    assert ", within 30 % of the largest element: the numbers say nothing about #1-2 (" in headline


class Halves(nn.Module):
    """Not linear any more: two of them, under names of their own."""

    def __init__(self, old: nn.Sequential) -> None:
        super().__init__()
        self.inner = old[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) * 1.0001


def test_a_step_inside_of_an_approximate_replacement_is_judged_with_it_and_the_report_says_so() -> None:
    sch = loose()
    sch["2"].replace(lambda old: Halves(old), params={"0.weight": "inner.weight", "0.bias": "inner.bias"}, rtol=1e-2)
    sch["2.inner"].checkpoint()
    report = slapo.verify(sch, torch.randn(5, 6))
    (note,) = report.notes
    assert note.startswith("judged only with the tolerance of the approximate steps (#1 at '0', #3 at '2'), without")
    assert note.endswith("#4 core.checkpoint at '2.inner'")
    sch["3"].replace(of(Scaled))
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(sch, torch.randn(5, 6))
    assert [step.partition("(")[0] for step in caught.value.steps] == ["#5 replace"]
