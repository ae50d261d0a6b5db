"""What both engines of target ``"deepspeed"`` are: state, refusals, and DeepSpeed's engine itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slapo_core import BuildError, Plan

if TYPE_CHECKING:
    from slapo_core.spec.request import BuildRequest

__all__ = ["DeepSpeedEngine"]


class DeepSpeedEngine:
    """State dicts and checkpoints by the request's state, read out of where DeepSpeed keeps it.

    Args:
        plan: what is built; ``plan.config["config"]`` is DeepSpeed's configuration, filled in.
        request: from ``build``.
        engine: DeepSpeed's, made by ``deepspeed.initialize``.

    Attributes:
        deepspeed: that one, for everything else that users do with it.
    """

    def __init__(self, plan: Plan, request: BuildRequest, engine: Any) -> None:
        self.plan, self.deepspeed = plan, engine
        self._request, self._state = request, request.state

    @property
    def module(self) -> nn.Module:
        return self._request.schedule.model

    def state_dict(self, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, Tensor]:
        """The untouched model's state dict; ``include_added`` gives what a step added too, under its own name."""
        return self._state.state_dict(rank0_only=rank0_only, include_added=include_added)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._state.load_state_dict(state)

    def check_replicas(self, *, repair: bool = False) -> None:
        self._state.check_replicas(repair=repair)

    def save(self, directory: str | os.PathLike[str]) -> None:
        raise NotImplementedError

    def load(self, directory: str | os.PathLike[str]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if not self._is_closed:
            self.deepspeed.destroy()
        self._is_closed = True

    _is_closed = False

    def _require_open(self) -> None:
        if self._is_closed:
            raise BuildError("the engine is closed")

    @staticmethod
    def _refuse_without_gradients() -> None:
        if not torch.is_grad_enabled():
            raise BuildError("train_step() was called without gradients")

    @staticmethod
    def _without_optimizer() -> BuildError:
        return BuildError("this engine cannot train: it was built without an optimizer")
