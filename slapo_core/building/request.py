"""What a dialect is handed: the implementation of :class:`slapo_core.spec.request.BuildRequest`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.building.first_steps import FirstSteps
from slapo_core.building.loss import LossCall
from slapo_core.building.micro_batches import labels_left_out, micro_batches
from slapo_core.building.modes import switch_to_training
from slapo_core.building.optimizer import make_optimizer
from slapo_core.ranks.world import World, together
from slapo_core.weights.clipping import GradientClipper

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
        world: the ranks, while ``build`` goes on.
    """

    def __init__(self, schedule: Schedule, arguments: Arguments, values: Materialisation, world: World) -> None:
        self._world = world
        self._schedule, self._arguments, self._values = schedule, arguments, values
        self._state = values.state
        self._first = FirstSteps(schedule.mesh, schedule.model, values.state)
        self._mesh = schedule.mesh
        self._loss_call = LossCall(schedule.model, arguments.loss)
        self._clipper: GradientClipper | None = None
        self._is_cut = False  # a batch, before
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
    def accumulate(self) -> int:
        return self._arguments.accumulate

    @property
    def device(self) -> torch.device | None:
        return self._arguments.torch_device()

    def materialise(self) -> Iterator[LiveTensor]:
        return self._values.run()

    def make_optimizer(self) -> torch.optim.Optimizer | None:
        with self.together("making the optimiser"):
            parameters = dict(self._schedule.model.named_parameters())
            optimizer = make_optimizer(parameters, self._arguments.optimizer, self._originals, self._split())
            if optimizer is not None:
                self._first.end_with(optimizer)
            return optimizer

    def _split(self) -> dict[int, list[int]]:
        """The axes along which parameters are split over running ranks, by their identity."""
        found: dict[int, list[int]] = {}
        for live in self._state.tensors():
            for mesh_dim, axis in live.layout.shards():
                if self._mesh is not None and self._mesh.size(mesh_dim) > 1:
                    found.setdefault(id(live.tensor), []).append(axis)
        return found

    def micro_batches(self, batch: Any) -> list[Any]:
        pieces = micro_batches(batch, self._arguments.accumulate)
        if len(pieces) > 1 and not self._is_cut:
            self._is_cut = True
            reason = labels_left_out(pieces)
            if reason is not None:
                warnings.warn(reason, stacklevel=3)
        return pieces

    def compute_loss(self, batch: Any, forward: Callable[..., Any] | None = None) -> tuple[torch.Tensor, Any]:
        if torch.is_grad_enabled():
            switch_to_training(self._schedule.model)
        with self._first.watched(batch):
            return self._loss_call(batch, forward)

    def evaluate(self, batch: Any) -> tuple[torch.Tensor, Any]:
        modes = [(module, module.training) for module in self._schedule.model.modules()]
        self._schedule.model.eval()
        try:
            with torch.no_grad(), self._first.watched(batch):
                return self._loss_call(batch)
        finally:
            for module, training in modes:
                module.training = training

    def clip_gradients(self) -> torch.Tensor | None:
        self._first.training_is_over()
        if self.max_grad_norm is None:
            return None
        if self._clipper is None:
            self._clipper = GradientClipper(self._values.correspondence, self.max_grad_norm)
        return self._clipper.clip()

    def together(self, what: str) -> AbstractContextManager[None]:
        return self._world.together(what) if self._world.is_open else together(self._mesh, what)
