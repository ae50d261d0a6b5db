"""Training with an engine and training by hand, and what differs between the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.building.batches import LossCall, micro_batches
from slapo_core.testing.bench import SEED, seeded

if TYPE_CHECKING:
    from slapo_core.spec.engine import Engine
    from slapo_core.spec.request import LossFunction, OptimizerFactory

__all__ = ["Training", "differences", "evaluate_by_hand", "train", "train_by_hand"]


@dataclass(frozen=True)
class Training:
    """What came of some steps.

    Args:
        losses: of each step.
        norms: of all gradients before clipping, of each step; empty where nothing was clipped.
        state: the state dict afterwards.
    """

    losses: Sequence[torch.Tensor]
    norms: Sequence[torch.Tensor]
    state: Mapping[str, torch.Tensor]

    def named(self) -> dict[str, torch.Tensor]:
        """Everything that can be compared, by the words for it."""
        return {
            **{f"the loss of step {number}": loss for number, loss in enumerate(self.losses, start=1)},
            **{f"the gradient norm of step {number}": norm for number, norm in enumerate(self.norms, start=1)},
            **{f"'{name}' after step {len(self.losses)}": tensor for name, tensor in self.state.items()},
        }


def train(engine: Engine, batches: Sequence[Any], *, first: int = 0) -> Training:
    """Take a step with each batch.

    Args:
        engine: it is trained.
        batches: one for each step.
        first: how many steps were taken before: step n has the same random numbers in every run.
    """
    results = []
    for number, batch in enumerate(batches, start=first):
        with seeded(SEED + number):
            results.append(engine.train_step(batch))
    norms = [result.grad_norm for result in results if result.grad_norm is not None]
    return Training([result.loss for result in results], norms, engine.state_dict())


def train_by_hand(
    model: nn.Module,
    batches: Sequence[Any],
    optimizer: OptimizerFactory,
    *,
    loss: LossFunction | None = None,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
) -> Training:
    """The same in plain PyTorch: what every engine must agree with; ``accumulate`` runs the model on as many pieces."""
    compute_loss, chosen = LossCall(model, loss), optimizer(list(model.parameters()))
    losses, norms = [], []
    for number, batch in enumerate(batches):
        with seeded(SEED + number):
            values = [compute_loss(piece)[0] for piece in micro_batches(batch, accumulate)]
        value = values[0] if accumulate == 1 else torch.stack(values).mean()
        chosen.zero_grad()
        value.backward()
        if max_grad_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
        chosen.step()
        losses.append(value.detach())
    return Training(losses, norms, {name: tensor.clone() for name, tensor in model.state_dict().items()})


def evaluate_by_hand(model: nn.Module, batch: Any, loss: LossFunction | None = None) -> tuple[torch.Tensor, Any]:
    """The loss and the output of a plain model in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad(), seeded():
        value, output = LossCall(model, loss)(batch)
    for module, training in modes:
        module.training = training
    return value, output


def differences(
    expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], *, tolerance: float
) -> list[str]:
    """What differs, one line each, in the order of ``expected``.

    Args:
        expected: by the words for it.
        got: likewise.
        tolerance: relative to the largest element of the expected tensor; 0 asks for the same bits.
    """
    lines = [f"{name}: missing" for name in expected if name not in got]
    lines += [f"{name}: not expected" for name in got if name not in expected]
    for name, reference in expected.items():
        text = _difference(reference, got[name], tolerance) if name in got else None
        if text is not None:
            lines.append(f"{name}: {text}")
    return lines


def _difference(expected: torch.Tensor, got: torch.Tensor, tolerance: float) -> str | None:
    if got.shape != expected.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    if got.dtype != expected.dtype:
        return f"{got.dtype} instead of {expected.dtype}"
    one, other = expected.detach().cpu(), got.detach().cpu()
    if torch.equal(one, other) or not one.numel():
        return None
    if not one.is_floating_point():
        return f"{other.flatten()[:4].tolist()} instead of {one.flatten()[:4].tolist()}"
    largest = float((one.double() - other.double()).abs().max())
    allowed = tolerance * max(float(one.double().abs().max()), 1e-3)
    if largest <= allowed:
        return None
    shown = f"{float(other):.6g} instead of {float(one):.6g}, " if one.dim() == 0 else ""
    return f"{shown}a difference of {largest:.3g} where {allowed:.3g} is allowed"
