"""What a user changes between two steps counts, or is refused: DeepSpeed keeps copies, and counts micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_core.testing import run_ranks

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.frozen = nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x).tanh()) + self.frozen(x)).square().mean()


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, eps=1e-4, weight_decay=0.1)


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("up.weight").clamp_(-0.1, 0.1)


def raise_last(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("down.bias").add_(1.0)  # of which ZeRO gives the first replica nothing


def freeze(model: nn.Module) -> None:
    model.get_submodule("down").requires_grad_(False)


def unfreeze(model: nn.Module) -> None:
    model.get_submodule("frozen").requires_grad_(True)


def by_hand(engine: Any) -> None:
    engine.deepspeed.backward(engine.deepspeed(batch(9)[:2]))
    engine.deepspeed.step()


def larger(engine: Any) -> None:
    engine.deepspeed.set_train_batch_size(engine.deepspeed.train_batch_size() * 2)


def on_module(change: Callable[[nn.Module], None]) -> Callable[[Any], None]:
    return lambda engine: change(engine.module)


def replace(module: nn.Module) -> None:
    module.up.weight = nn.Parameter(module.up.weight.detach().clone())  # type: ignore[union-attr, operator]


CHANGES: dict[str, Callable[[Any], None]] = {
    "nothing": lambda engine: None,
    "in place": on_module(clamp),
    "in place, on another rank": on_module(raise_last),
    "frozen": on_module(freeze),
    "unfrozen": on_module(unfreeze),
    "replaced": on_module(replace),
    "by hand": by_hand,
    "accumulation": larger,
    "own checkpoint": lambda engine: engine.load_state_dict(engine.state_dict()),
}


def outcome(stage: int, change: str) -> dict[str, torch.Tensor] | str:
    """The state after a step, the change, and two more steps; or the refusal."""
    engine: Any = slapo.build(
        slapo.create_schedule(make(), mesh={"dp": 2}),
        target="deepspeed",
        optimizer=adamw,
        config={"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 2},
    )
    try:
        for step in range(3):
            engine.train_step(batch(step).chunk(2)[dist.get_rank()])
            if step == 0:
                CHANGES[change](engine)
        return dict(engine.state_dict())
    except slapo.BuildError as error:
        return str(error)


def outcomes() -> dict[tuple[int, str], Any]:
    return {(stage, change): outcome(stage, change) for stage in (0, 1, 3) for change in CHANGES}


@functools.cache
def found() -> dict[tuple[int, str], Any]:
    mine, other = run_ranks(outcomes, world_size=2)
    assert {key: isinstance(value, str) for key, value in mine.items()} == {
        key: isinstance(value, str) for key, value in other.items()
    }
    return mine


PLAIN = {"in place": clamp, "in place, on another rank": raise_last, "frozen": freeze}


@functools.cache
def plain(change: str) -> dict[str, torch.Tensor]:
    model = make()
    optimizer = adamw(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()
        if step == 0 and change in PLAIN:
            PLAIN[change](model)
    return dict(model.state_dict())


COUNTS = [
    (0, "in place"),
    (0, "in place, on another rank"),
    (0, "frozen"),
    *((stage, each) for stage in (0, 1, 3) for each in ("nothing", "own checkpoint")),
]


@pytest.mark.parametrize(("stage", "change"), COUNTS)
def test_what_counts_in_plain_training_counts(stage: int, change: str) -> None:
    state = found()[stage, change]
    assert not isinstance(state, str), state
    torch.testing.assert_close(state, plain(change), atol=1e-6, rtol=1e-5)


SAYS = {
    "in place": "'up.weight' was changed in place since the last step, and DeepSpeed trains a copy of it",
    "in place, on another rank": "'down.bias' was changed in place since the last step, and DeepSpeed trains a copy",
    "frozen": "'down.weight' was frozen after the build: DeepSpeed would go on to step it",
    "unfrozen": "'frozen.weight' was unfrozen after the build: DeepSpeed has no state for it, and would never step it",
    "replaced": "'up.weight' is another parameter now than at the build: DeepSpeed would go on to train that one",
    "by hand": "engine.deepspeed was given 1 of the 2 micro-batches of a step by hand",
    "accumulation": "DeepSpeed accumulates 4 micro-batches now, and this engine gives it 2 a step",
}


@pytest.mark.parametrize(
    ("stage", "change"), [(stage, each) for each in SAYS for stage in (0, 1, 3) if (stage, each) not in COUNTS]
)
def test_what_deepspeed_would_pass_over_is_refused(stage: int, change: str) -> None:
    text = found()[stage, change]
    assert isinstance(text, str)
    assert text.startswith(SAYS[change]), text
    assert "\n  hint: " in text
