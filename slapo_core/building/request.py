"""What a dialect is handed: the implementation of :class:`slapo_core.spec.request.BuildRequest`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.building.clipping import GradientClipper
from slapo_core.building.loss import LossCall
from slapo_core.building.optimizer import make_optimizer
from slapo_core.ranks.world import together

if TYPE_CHECKING:
    from slapo_core.building.arguments import Arguments
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.state import LiveTensor, ModelState
    from slapo_core.weights.materialise import Materialisation

__all__ = ["Request"]


class Request:
    """Made by the hand-over phase; documented in spec/request.py.

    Args:
        schedule: all ranks have the same.
        arguments: what the user gave to ``build``.
        values: the tensors and their values.
    """

    def __init__(self, schedule: Schedule, arguments: Arguments, values: Materialisation) -> None:
        self._schedule, self._arguments, self._values = schedule, arguments, values
        self._state: ModelState = values.state
        self._mesh = schedule.mesh
        self._loss_call = LossCall(schedule.model, arguments.loss)
        self._clipper: GradientClipper | None = None
        self._originals = {id(tensor): name for name, tensor in values.untouched.items()}

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    @property
    def state(self) -> ModelState:
        return self._state

    @property
    def optimizer(self) -> Any:
        return self._arguments.optimizer

    @property
    def loss(self) -> Any:
        return self._arguments.loss

    @property
    def max_grad_norm(self) -> float | None:
        return self._arguments.max_grad_norm

    @property
    def device(self) -> torch.device | None:
        return self._arguments.torch_device()

    def materialise(self) -> Iterator[LiveTensor]:
        return self._values.run()

    def make_optimizer(self, parameters: Sequence[nn.Parameter] | None = None) -> torch.optim.Optimizer | None:
        named = dict(self._schedule.model.named_parameters())
        if parameters is not None:
            wanted = {id(parameter) for parameter in parameters}
            named = {name: parameter for name, parameter in named.items() if id(parameter) in wanted}
        with self.together("making the optimiser"):
            return make_optimizer(named, self._arguments.optimizer, self._originals)

    def compute_loss(self, batch: Any, forward: Callable[..., Any] | None = None) -> tuple[torch.Tensor, Any]:
        return self._loss_call(batch, forward)

    def clip_gradients(self) -> torch.Tensor | None:
        if self.max_grad_norm is None:
            return None
        if self._clipper is None:
            self._clipper = GradientClipper(self._values.correspondence, self.max_grad_norm)
        return self._clipper.clip()

    def together(self, what: str) -> AbstractContextManager[None]:
        return together(self._mesh, what)
