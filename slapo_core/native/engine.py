"""The engine of target ``"torch"``: a plain training step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slapo_core import BuildError, StepResult
from slapo_core.native.runtime import TorchRuntime

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
        self._micro_batches = request.micro_batches
        self._runtime: TorchRuntime | None = TorchRuntime(self._replicated(request), request.clip_gradients)
        self._runtime.watch(self.optimizer)

    def _replicated(self, request: BuildRequest) -> nn.Module:
        """What a training step calls: the model, or its DistributedDataParallel."""
        model, mesh = self._module, request.schedule.mesh
        if mesh is None or mesh.size("dp") == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        return DistributedDataParallel(model, process_group=mesh.group("dp"), **self.plan.config)

    @property
    def torch(self) -> TorchRuntime:
        """The pieces of a training step, for loops written by hand.

        Raises:
            BuildError: the engine is closed.
        """
        if self._runtime is None:
            raise _closed()
        return self._runtime

    @property
    def module(self) -> nn.Module:
        return self._module

    # -- steps; documented in spec/engine.py ------------------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        optimizer, runtime = self.optimizer, self._runtime
        if optimizer is None or runtime is None:
            raise self._cannot_train()
        if not torch.is_grad_enabled():
            raise BuildError(
                "train_step() was called without gradients: inside of torch.no_grad() or torch.inference_mode()",
                hint="call it outside of that block, or engine.eval_step(batch) inside",
            )
        pieces = self._micro_batches(batch)
        losses, output = [], None
        for number, piece in enumerate(pieces, start=1):
            with runtime.no_sync() if number < len(pieces) else contextlib.nullcontext():
                loss, output = self._compute_loss(piece, runtime.module)
                if number == 1:
                    optimizer.zero_grad(set_to_none=True)
                (loss / len(pieces) if len(pieces) > 1 else loss).backward()
            losses.append(loss.detach())
        norm = runtime.clip_gradients()
        optimizer.step()
        if len(pieces) > 1:
            return StepResult(torch.stack(losses).mean(), None, norm)
        return StepResult(losses[0], output, norm)

    def eval_step(self, batch: Any) -> StepResult:
        if self._runtime is None:
            raise _closed()
        loss, output = self._evaluate(batch)
        return StepResult(loss, output)

    # -- state ------------------------------------------------------------------------------------------------

    def state_dict(self, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, Tensor]:
        """The untouched model's state dict; ``include_added`` gives what a step added too, under its own name."""
        return self._state.state_dict(rank0_only=rank0_only, include_added=include_added)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._state.load_state_dict(state)

    def check_replicas(self, *, repair: bool = False) -> None:
        self._state.check_replicas(optimizer=self.optimizer, repair=repair)

    def save(self, directory: str | os.PathLike[str]) -> None:
        self._state.save(directory, optimizer=self.optimizer)

    def load(self, directory: str | os.PathLike[str]) -> None:
        self._state.load(directory, optimizer=self.optimizer)

    def close(self) -> None:
        """Let go of the optimiser and of DistributedDataParallel; the model and its state stay."""
        if self._runtime is not None:
            self._runtime.close()
        self._runtime = self.optimizer = None

    def _cannot_train(self) -> BuildError:
        if self._runtime is None:
            return _closed()
        return BuildError(
            "this engine cannot train: it was built without an optimizer",
            hint="build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))",
        )


def _closed() -> BuildError:
    return BuildError("the engine is closed", hint="schedule and build a fresh model, with weights=engine.state_dict()")
