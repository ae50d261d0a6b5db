"""A language model of four blocks, in float64, and a run of it for some steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import slapo_core as slapo

CLASSES = 11
CHUNK = 2


class Net(nn.Module):
    """Embedding, blocks, head; the loss is that of the next token.

    Args:
        bias: whether the head has one.
        tied: whether embedding and head share their weight.
    """

    def __init__(self, *, bias: bool = False, tied: bool = False, classes: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(classes, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, classes, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def hidden(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return hidden

    def forward(self, ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        logits = self.head(self.hidden(ids))
        if labels is None:
            return {"logits": logits}
        shifted = logits[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        if num_items_in_batch is None:
            return {"loss": F.cross_entropy(shifted, targets), "logits": logits}
        return {"loss": F.cross_entropy(shifted, targets, reduction="sum") / num_items_in_batch, "logits": logits}


def batch(seed: int = 0, samples: int = 4, *, ignored: int = 3, largest: int = CLASSES) -> dict[str, Tensor]:
    """Return ids and labels, some ignored, none as large as ``largest``."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, CLASSES, (samples, 7), generator=generator)
    labels = torch.randint(0, largest, (samples, 7), generator=generator)
    labels[0, :ignored] = -100
    return {"ids": ids, "labels": labels}


def trained(model: nn.Module, given: Callable[[int], dict[str, Any]] = batch, steps: int = 3) -> list[Tensor]:
    """Take steps of AdamW; return losses, gradients of the last step, and parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[Tensor] = []
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**given(step))["loss"]
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    return [*losses, *gradients, *(one.detach().clone() for one in model.parameters())]


def agree(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    """Compare lists of tensors."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


class _Logits(TorchDispatchMode):
    """Counts tensors of all tokens by all classes."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(result):
            if isinstance(one, Tensor) and one.shape[-1:] == (CLASSES,) and not one.is_meta:
                # More elements than the weight has.
                self.made += one.numel() > 6 * CLASSES
        return result


def logits_made(model: nn.Module, given: dict[str, Any] | None = None) -> int:
    """Return how many tensors of all logits a training step makes."""
    model.train()
    with _Logits() as mode:
        output = model(**(given or batch()))
        (output["loss"] if isinstance(output, dict) else output.loss).backward()
    model.zero_grad()
    return mode.made


def scheduled(model: nn.Module, **options: Any) -> Any:
    sch = slapo.create_schedule(model, example_inputs=batch())
    sch["head"].linear_cross_entropy(**{"chunk": CHUNK, **options})
    return sch


def _doubled(forward: Any) -> Any:
    return lambda module, input: forward(module, input) * 2


_doubled.slapo_goes_around = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Double(slapo.Primitive):
    """Double what a module gives, which it should not."""

    name = "test.double"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: Any, edit: Any) -> None:
        edit.wrap_forward(node, _doubled)
