"""The engine of target ``"torch"``: a plain training step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core import BuildError, StepResult

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_core.spec.request import BuildRequest

__all__ = ["TorchEngine"]


class TorchEngine:
    """The implementation of :class:`slapo_core.spec.engine.Engine` in plain PyTorch.

    Args:
        plan: what is built; ``plan.config`` holds the options of DistributedDataParallel.
        request: from ``build``.
    """

    def __init__(self, plan: Plan, request: BuildRequest) -> None:
        self.plan = plan
        self.optimizer = request.make_optimizer()
        self._module = request.schedule.model
        self._state = request.state
        self._compute_loss, self._evaluate = request.compute_loss, request.evaluate
        self._clip_gradients = request.clip_gradients
        self._forward: nn.Module | None = self._replicated(request)

    def _replicated(self, request: BuildRequest) -> nn.Module:
        """What a training step calls: the model, or its DistributedDataParallel."""
        model, mesh = self._module, request.schedule.mesh
        if mesh is None or mesh.size("dp") == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, process_group=mesh.group("dp"), **self.plan.config)

    @property
    def module(self) -> nn.Module:
        return self._module

    # -- steps; documented in spec/engine.py ------------------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        optimizer = self.optimizer
        if optimizer is None or self._forward is None:
            raise self._cannot_train()
        loss, output = self._compute_loss(batch, self._forward)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = self._clip_gradients()
        optimizer.step()
        return StepResult(loss.detach(), output, norm)

    def eval_step(self, batch: Any) -> StepResult:
        if self._forward is None:
            raise _closed()
        loss, output = self._evaluate(batch)
        return StepResult(loss, output)

    # -- state ------------------------------------------------------------------------------------------------

    def state_dict(self, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, torch.Tensor]:
        """The untouched model's state dict; ``include_added`` gives what a step added too, under its own name."""
        return self._state.state_dict(rank0_only=rank0_only, include_added=include_added)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state.load_state_dict(state)

    def save(self, directory: str | os.PathLike[str]) -> None:
        self._state.save(directory, optimizer=self.optimizer)

    def load(self, directory: str | os.PathLike[str]) -> None:
        self._state.load(directory, optimizer=self.optimizer)

    def close(self) -> None:
        """Let go of the optimiser and of DistributedDataParallel; the model and its state stay."""
        self._forward = self.optimizer = None

    def _cannot_train(self) -> BuildError:
        if self._forward is None:
            return _closed()
        return BuildError(
            "this engine cannot train: it was built without an optimizer",
            hint="build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))",
        )


def _closed() -> BuildError:
    return BuildError("the engine is closed", hint="schedule and build a fresh model, with weights=engine.state_dict()")
