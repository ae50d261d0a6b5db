"""The reference model's steps, and those of an engine of target megatron: losses, gradients, norms and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from tests.support import tied_model

__all__ = ["Steps", "gradients_of", "same", "stepped", "untouched"]

STEPS = 3


@dataclass
class Steps:
    """What steps gave, one entry each; ``gradients`` after clipping, by the reference model's names."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def untouched(
    make: Callable[[], nn.Module] = tied_model.make,
    optimizer: Callable[[Any], torch.optim.Optimizer] = tied_model.adamw,
    *,
    clip: float | None = tied_model.CLIP,
    batch: Callable[[int], Mapping[str, Any]] = tied_model.batch,
    steps: int = STEPS,
) -> Steps:
    """In one process, in plain torch."""
    model, found = make(), Steps()
    inner = optimizer(list(model.parameters()))
    for step in range(steps):
        inner.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        norm = None
        if clip is not None:
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
        found.norms.append(norm)
        found.losses.append(float(loss.detach()))
        found.gradients.append(
            {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        )
        inner.step()
    found.weights = {name: one.detach().clone() for name, one in model.state_dict().items()}
    return found


def gradients_of(sch: slapo.Schedule, engine: Any) -> dict[str, torch.Tensor]:
    """Every ``main_grad``, put together in the reference model's layout: a collective."""
    return {
        live.reference_name: live.layout.full(live.tensor.main_grad, sch.mesh).clone()
        for live in engine._context.state.tensors()
        if live.is_parameter and live.is_local and live.tensor.requires_grad
    }


def stepped(
    sch: slapo.Schedule,
    engine: Any,
    *,
    batch: Callable[[int], Mapping[str, Any]] = tied_model.batch,
    share: Callable[..., Any] = tied_model.share,
    steps: int = STEPS,
    gradients: bool = True,
    weights: bool = True,
) -> Steps:
    """Those of an engine, which is closed then; losses are those of this rank's replica."""
    found = Steps()
    for step in range(steps):
        result = engine.train_step(share(batch(step), sch.mesh))
        found.losses.append(float(result.loss))
        found.norms.append(None if result.grad_norm is None else float(result.grad_norm))
        if gradients:
            found.gradients.append(gradients_of(sch, engine))
    found.weights = dict(engine.state_dict()) if weights else {}
    engine.close()
    return found


def same(ranks: list[Steps], wanted: Steps, *, rel: float = 2e-6, atol: float = 2e-6) -> None:
    """Assert that the ranks' steps are those of the reference model."""
    mean = [sum(values) / len(ranks) for values in zip(*(rank.losses for rank in ranks), strict=True)]
    assert mean == pytest.approx(wanted.losses, rel=rel)
    for rank in ranks:
        if wanted.norms[0] is not None:
            assert rank.norms == pytest.approx(wanted.norms, rel=rel)
        for found, one in zip(rank.gradients, wanted.gradients, strict=False):
            assert found.keys() >= one.keys()
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, one.get(name, torch.zeros_like(gradient)), rtol=1e-5, atol=atol)
        assert rank.weights.keys() == wanted.weights.keys()
        for name, value in rank.weights.items():
            torch.testing.assert_close(
                value, wanted.weights[name], rtol=1e-5, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )
