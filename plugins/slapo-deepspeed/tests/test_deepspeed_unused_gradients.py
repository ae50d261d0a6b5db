"""A parameter that a step, or its first micro-batch, does not use: the last step's gradient must not come back."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_testing import run_ranks

pytestmark = pytest.mark.ranks

STEPS, CLIP = 4, 0.05
USED = {
    "every second step": [True, True, False, False],
    "the second micro-batch only": [False, True],
    "the first micro-batch only": [True, False],
}
"""Whether a pass uses the layer in the middle, pass by pass, two in a step."""
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"ZeRO-{stage}": {"stage": stage} for stage in range(4)},
    **{f"ZeRO-{stage}, offloaded": {"stage": stage, **OFFLOADED} for stage in (1, 2, 3)},
}


class Net(nn.Module):
    def __init__(self, used: list[bool]) -> None:
        super().__init__()
        self.used, self.passes = used, 0
        self.up, self.middle, self.down = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).tanh()
        if self.used[self.passes % len(self.used)]:
            y = self.middle(y).tanh()
        self.passes += 1
        return self.down(y).square().mean()


def make(used: str) -> Net:
    torch.manual_seed(0)
    return Net(USED[used])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, eps=1e-4, weight_decay=0.1)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def trained(config: str, used: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The state after the steps, and what was warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state = _trained(config, used)
    return state, [str(one.message) for one in told if "no gradient" in str(one.message)]


def _trained(config: str, used: str) -> dict[str, torch.Tensor]:
    engine = slapo.build(
        slapo.create_schedule(make(used), mesh={"dp": 2}),
        target="deepspeed",
        optimizer=adamw,
        max_grad_norm=CLIP,
        accumulate=2,
        config={"zero_optimization": CONFIGS[config]},
    )
    for step in range(STEPS):
        engine.train_step(batch(step).chunk(2)[dist.get_rank()])
    return dict(engine.state_dict())


def all_of_them() -> dict[tuple[str, str], tuple[dict[str, torch.Tensor], list[str]]]:
    return {(config, used): trained(config, used) for config in CONFIGS for used in USED}


@functools.cache
def found() -> dict[tuple[str, str], tuple[dict[str, torch.Tensor], list[str]]]:
    return run_ranks(all_of_them, world_size=2)[0]


@functools.cache
def by_hand(used: str) -> dict[str, torch.Tensor]:
    """The same micro-batches in one process; what has no gradient gets one of zero, as everywhere in DeepSpeed."""
    model = make(used)
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        shares = [share.chunk(2) for share in batch(step).chunk(2)]
        for micro in range(2):
            for share in shares:
                model.passes = 2 * step + micro
                (model(share[micro]) / 4).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_step_uses_no_gradient_of_the_previous_step(config: str, used: str) -> None:
    state, told = found()[config, used]
    torch.testing.assert_close(state, by_hand(used), atol=1e-6, rtol=1e-5)
    # One warning, at the first step in which the layer is not used at all: the second one, or none.
    expected = ["training step 2 gave 'middle.weight', 'middle.bias' "] if "step" in used else []
    assert [text.partition("no gradient")[0] for text in told] == expected
