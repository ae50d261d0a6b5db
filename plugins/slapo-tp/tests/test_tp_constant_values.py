"""Values of the constructor - zero biases, small gates, norms of ones - hide no mistake of a schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slapo_core as slapo

pytestmark = pytest.mark.ranks

X = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))


class Norm(nn.Module):
    """In float32, as models have it: which lowers the tolerance for everything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        return (self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


class Down(nn.Module):
    """A linear layer that slapo does not know: its bias is added on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32) * 0.2)
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + self.bias


class Block(nn.Module):
    def __init__(self, down: nn.Module, gate: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(), nn.Linear(16, 32), down
        self.gate = nn.Parameter(torch.full((16,), gate))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.gate * self.down(self.up(self.norm(x)).relu())
        return out


def scheduled(down: nn.Module, gate: float) -> slapo.Schedule:
    sch = slapo.create_schedule(nn.Sequential(Block(down, gate), nn.Linear(16, 10)), mesh={"tp": 2})
    sch["0.up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["0.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    return sch


@pytest.mark.parametrize("gate", [1e-2, 0.0])
def test_a_bias_that_each_rank_adds_is_found_behind_a_small_gate(gate: float) -> None:
    sch = scheduled(Down(), gate)
    before = {name: value.clone() for name, value in sch.model.named_parameters()}
    with pytest.raises(slapo.VerifyError) as error:
        slapo.verify(sch, X)
    assert error.value.rank == 0
    assert error.value.tensor == "output"
    assert all(torch.equal(value, before[name]) for name, value in sch.model.named_parameters())


def test_the_same_schedule_of_a_layer_that_is_known_agrees() -> None:
    down = nn.Linear(32, 16)
    nn.init.zeros_(down.bias)
    assert slapo.verify(scheduled(down, 0.0), X).world_size == 2


class Adapter(nn.Module):
    """A low-rank layer beside another: its second matrix is zero at first, and so is the gradient of its first."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(16, 32), nn.Linear(16, 2, bias=False), nn.Linear(2, 32, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.b(self.a(x))
        return out


def test_the_sum_that_an_adapter_lacks_is_named_though_it_shows_only_after_an_update() -> None:
    sch = slapo.create_schedule(nn.Sequential(Adapter(), nn.ReLU(), nn.Linear(32, 16)), mesh={"tp": 2})
    sch["0.base"].shard(["weight", "bias"], axis=0)
    sch["0.b"].shard("weight", axis=0)
    sch["0"].sync("bwd_post", "all_reduce")
    sch["2"].shard("weight", axis=1).sync("forward")
    with pytest.raises(slapo.VerifyError) as error:
        slapo.verify(sch, X)
    assert error.value.tensor == "gradient of 0.a.weight"
    assert "add sch['0.a'].sync_gradient('weight')" in error.value.message
    sch["0.a"].sync_gradient("weight")
    assert slapo.verify(sch, X).world_size == 2
