"""Each tensor is held to the floating-point types that led to it, and these are as fine as the model allows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slapo_core as slapo


class NoDoubleKernel(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dtype is torch.float64:
            raise RuntimeError("'lookup' not implemented for 'Double'")
        return torch.tanh(input)


class Off(nn.Linear):
    """A linear layer that is wrong by a factor."""

    by = 1.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.by


def off(by: float) -> nn.Module:
    module = Off(4, 4)
    module.by = by
    return module


def test_a_half_precision_model_without_float64_kernels_is_verified_in_float32() -> None:
    def scheduled() -> slapo.Schedule:
        model = nn.Sequential(nn.Linear(4, 4), NoDoubleKernel(), nn.Linear(4, 4))
        return slapo.create_schedule(model.to(torch.bfloat16))

    torch.manual_seed(0)
    batch = torch.randn(3, 4, dtype=torch.bfloat16)
    sch = scheduled()
    sch["2"].replace(off(1.0).to(torch.bfloat16))
    report = slapo.verify(sch, batch)
    assert (report.dtype, report.coarsest_dtype) == ("float32", "float32")
    (note,) = report.notes
    assert note.startswith(
        "both ran in float32, because the untouched one raises in float64: RuntimeError: 'lookup' not implemented for "
    )
    sch = scheduled()
    sch["2"].replace(off(1.001).to(torch.bfloat16))  # less than a rounding of bfloat16
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(sch, batch)
    assert caught.value.tensor == "output"
    assert caught.value.message.splitlines()[1].endswith("(float32, REORDERED)")


def test_a_scheduled_model_that_cannot_run_in_float64_is_run_in_float32() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(torch.bfloat16)
    sch = slapo.create_schedule(model)
    sch["1"].replace(NoDoubleKernel())
    report = slapo.verify(sch, torch.randn(3, 4, dtype=torch.bfloat16))
    assert report.dtype == "float32"
    assert report.notes[0].startswith(
        "both ran in float32, because the scheduled model raises in float64: RuntimeError: 'lookup' not implemented"
    )


class TwoHeads(nn.Module):
    """One of them in float32."""

    def __init__(self, *, as_number: bool = False) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Linear(4, 4), nn.Linear(4, 4)
        self.as_number = as_number

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        coarse = torch.softmax(self.coarse(x).float(), -1)
        scale = coarse.sum().item() if self.as_number else 1.0
        return self.fine(x) * scale, coarse.to(x.dtype)


@pytest.mark.parametrize("path", ["fine", "coarse"])
def test_a_part_in_float32_does_not_loosen_what_never_went_through_it(path: str) -> None:
    torch.manual_seed(0)
    sch = slapo.create_schedule(TwoHeads())
    sch[path].replace(off(1 + 1e-7))
    if path == "coarse":
        report = slapo.verify(sch, torch.randn(3, 4))
        assert (report.dtype, report.coarsest_dtype) == ("float64", "float32")
        allowed = {entry.kind: entry.allowed for entry in report.largest}
        assert allowed["output"] > 1e-7
    else:
        with pytest.raises(slapo.VerifyError) as caught:
            slapo.verify(sch, torch.randn(3, 4))
        assert caught.value.tensor == "output[0]"
        assert caught.value.tolerance < 1e-9
        rule = caught.value.message.splitlines()[1]
        assert rule == "  allowed: 1e-10 * max|reference| + 1e-12 * scale (float64, REORDERED)"


def test_a_number_taken_out_of_a_tensor_carries_its_type_on() -> None:
    torch.manual_seed(0)
    sch = slapo.create_schedule(TwoHeads(as_number=True))
    sch["fine"].replace(off(1 + 1e-7))
    assert slapo.verify(sch, torch.randn(3, 4))
