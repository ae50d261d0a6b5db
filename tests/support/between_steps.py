"""A small model of which a user changes something between two steps: for the engines of several targets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_testing import run_ranks

__all__ = ["CHANGES", "Net", "adamw", "batch", "make", "outcome", "plain", "share", "told"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.frozen = nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.up.weight.dtype)
        return (self.down(self.up(x).tanh()) + self.frozen(x)).square().mean()


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def share(step: int) -> torch.Tensor:
    """What this replica of two has of it."""
    return batch(step).chunk(2)[dist.get_rank()]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, eps=1e-4, weight_decay=0.1)


def clamp(model: Any) -> None:
    with torch.no_grad():
        model.up.weight.clamp_(-0.1, 0.1)


def clamp_elsewhere(model: Any) -> None:
    model.up.weight.data = model.up.weight.data.clamp(-0.1, 0.1)


def move(model: Any) -> None:
    model.up.weight.data = model.up.weight.data.clone()


def raise_last(model: Any) -> None:
    with torch.no_grad():
        model.down.bias.add_(1.0)  # of which a distributed optimizer gives the first replica nothing


def exchange(model: Any) -> None:
    model.up.weight = nn.Parameter(model.up.weight.detach().clone())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "in place": clamp,
    "in place, on another rank": raise_last,
    "other memory": clamp_elsewhere,
    "other memory, same values": move,
    "frozen": lambda model: model.down.requires_grad_(False),
    "unfrozen": lambda model: model.frozen.requires_grad_(True),
    "another one": exchange,
}
"""Of a model."""


def outcome(change: Callable[[Any], Any], model: nn.Module | None = None, **options: Any) -> Any:
    """The state after a step of two replicas, the change of their engine, and two more steps; or the refusal.

    Args:
        change: is given the engine.
        model: that is trained; None: :func:`make`'s.
        options: of ``build``.
    """
    sch = slapo.create_schedule(make() if model is None else model, mesh={"dp": 2})
    engine: Any = slapo.build(sch, optimizer=adamw, **options)
    try:
        for step in range(3):
            engine.train_step(share(step))
            if step == 0:
                change(engine)
        return dict(engine.state_dict())
    except slapo.BuildError as error:
        return str(error)
    finally:
        engine.close()


def told(on_rank: Callable[[], Mapping[Any, Any]]) -> Mapping[Any, Any]:
    """What the first of two ranks found, of whose cases the other one refused the same."""
    mine, other = run_ranks(on_rank, world_size=2, timeout=300)
    assert {key: isinstance(value, str) for key, value in mine.items()} == {
        key: isinstance(value, str) for key, value in other.items()
    }
    return mine


@functools.cache
def plain(change: str) -> dict[str, torch.Tensor]:
    """The state after the same by hand, in one process."""
    model = make()
    optimizer = adamw(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()
        if step == 0 and change in CHANGES:
            CHANGES[change](model)
    return dict(model.state_dict())
