"""What both engines of target ``"megatron"`` are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core import Plan
from slapo_core.spec.stateful import StatefulEngine
from slapo_megatron.runtime import Megatron

if TYPE_CHECKING:
    from slapo_core.spec.request import BuildRequest

__all__ = ["MegatronEngine"]


class MegatronEngine(StatefulEngine):
    """State dicts and checkpoints by the request's state, read out of where Megatron keeps it.

    Args:
        plan: what is built.
        request: from ``build``.
        megatron: its objects.

    Attributes:
        megatron: those.
    """

    def __init__(self, plan: Plan, request: BuildRequest, megatron: Megatron) -> None:
        self.plan, self.megatron = plan, megatron
        self._request, self._state = request, request.state
        self._is_closed = False

    @property
    def module(self) -> nn.Module:
        return self._request.schedule.model

    @property
    def optimizer(self) -> Any:  # type: ignore[override]
        """Megatron's optimizer; None where the engine only evaluates, or is closed."""
        return None if self._is_closed else self.megatron.optimizer

    def close(self) -> None:
        """Let go of Megatron's objects; the model and its state stay."""
        if not self._is_closed:
            self._is_closed = True
            self._release()

    def _release(self) -> None:
        """Let go of what an engine holds beside Megatron's objects; called once."""

    def _require_open(self) -> None:
        if self._is_closed:
            raise self._closed()
