"""A model whose embedding is tied to its head, and its training by hand with main parameters in float32: for tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["IDS", "Words", "adamw", "by_hand", "loss_of"]

IDS = torch.arange(32).reshape(8, 4) * 5 % 7


class Head(nn.Linear):
    both = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight if self.both else self.weight.detach())


class Words(nn.Module):
    """The embedding's weight is used at both ends.

    Args:
        both: whether it gets a gradient at both.
    """

    def __init__(self, *, both: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.emb, self.one, self.two = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = Head(4, 7, bias=False)
        self.head.weight, self.head.both = self.emb.weight, both

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.two(self.one(self.emb(ids)).tanh()))  # type: ignore[no-any-return]


def loss_of(output: torch.Tensor, given: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float().flatten(0, 1), given["ids"].flatten())


def adamw(parameters: Any, weight_decay: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=weight_decay)


def by_hand(
    model: nn.Module, low: torch.dtype, clip: float = 0.0, weight_decay: float = 0.01
) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """Train on :data:`IDS`; after each step its loss, and the main parameters by name.

    Args:
        model: a :class:`Words`; it is cast.
        low: the type that it computes in.
        clip: the largest norm of all gradients; 0.0: nothing is clipped.
        weight_decay: of all parameters.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(low)
    main = {one: one.detach().float().requires_grad_() for one in model.parameters()}
    optimizer = adamw(main.values(), weight_decay)
    for _ in range(4):
        optimizer.zero_grad()
        model.zero_grad()
        loss = loss_of(model(IDS), {"ids": IDS})
        loss.backward()
        for one, copy in main.items():
            assert one.grad is not None
            copy.grad = one.grad.float()
        if clip:
            nn.utils.clip_grad_norm_(main.values(), clip)
        optimizer.step()
        with torch.no_grad():
            for one, copy in main.items():
                one.copy_(copy)
        yield float(loss.detach()), {name: main[one].detach() for name, one in model.named_parameters()}
