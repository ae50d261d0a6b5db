"""What every engine of target ``"torch"`` does with its state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slapo_core import BuildError

if TYPE_CHECKING:
    from slapo_core.spec.state import ModelState

__all__ = ["StatefulEngine"]


class StatefulEngine:
    """State dicts and checkpoints by the request's state, and refusals of steps.

    Attributes:
        optimizer: None where the engine only evaluates, or is closed.
    """

    optimizer: torch.optim.Optimizer | None
    _state: ModelState

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

    @staticmethod
    def _refuse_without_gradients() -> None:
        """Refuse a training step where torch computes no gradients."""
        if not torch.is_grad_enabled():
            raise BuildError(
                "train_step() was called without gradients: inside of torch.no_grad() or torch.inference_mode()",
                hint="call it outside of that block, or engine.eval_step(batch) inside",
            )

    @staticmethod
    def _without_optimizer() -> BuildError:
        return BuildError(
            "this engine cannot train: it was built without an optimizer",
            hint="build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))",
        )

    @staticmethod
    def _closed(reason: str = "") -> BuildError:
        return BuildError(
            f"the engine is closed{reason and ', because '}{reason}",
            hint="schedule and build a fresh model, with weights=engine.state_dict()",
        )
