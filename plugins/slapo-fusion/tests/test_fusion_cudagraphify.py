"""``cudagraphify``: says that it does nothing without CUDA; with it, captures what can be captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_core as slapo
from slapo_fusion import Cudagraphify
from slapo_fusion.cases import Feed
from slapo_fusion.cudagraphify import Captured
from tests.messages import Messages


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_does_nothing_and_says_so() -> None:
    model = nn.Sequential(Feed())
    sch = slapo.create_schedule(model)
    sch["0"].apply(Cudagraphify())
    assert "there is no CUDA device: the forward runs as it is" in sch.records[0].effects
    assert "forward" not in model[0].__dict__
    slapo.verify(sch, torch.randn(3, 6))


def test_what_it_refuses(message: Messages) -> None:
    model = nn.Sequential(Feed(), Feed())
    model[1].up.register_full_backward_hook(lambda *_: None)
    sch = slapo.create_schedule(model)
    sch["0"].apply(Cudagraphify())
    for path, step, word in (
        ("0", Cudagraphify(), "captured already"),
        ("1", Cudagraphify(), "'1.up' has backward hooks"),
        ("1", Cudagraphify(warmup=0), "at least 1"),
    ):
        with pytest.raises(slapo.PreconditionError) as refused:
            sch[path].apply(step)
        message(refused, word)


def forward(module: nn.Module, x: Tensor, scale: Any = 1.0) -> Tensor:
    return x * scale


def test_what_cannot_be_captured_is_refused_at_the_call(message: Messages) -> None:
    captured = Captured(forward, path="block", warmup=1, most_shapes=1)
    x = torch.randn(2)
    with pytest.raises(slapo.ApplyError) as refused:
        captured(nn.Identity(), x, 2.0)
    message(refused, "at 'block'", "float")
    with torch.no_grad():
        assert torch.equal(captured(nn.Identity(), x, 2.0), x * 2)
    assert torch.equal(captured(nn.Identity(), x), x)  # on a CPU it runs as it is


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_outputs_and_gradients_are_those_of_the_forward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Feed().eval()).cuda()
    x = torch.randn(3, 6, device="cuda", requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    slapo.create_schedule(model)["0"].apply(Cudagraphify())
    for _ in range(3):
        torch.testing.assert_close(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]), expected)
