"""A base class of the engines of target ``"torch"``: precision, the scale of the loss, and the optimizer's step."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from slapo_runtime.engine import StatefulEngine
from slapo_torch.data_options import data_ranks, is_sharded, materialize
from slapo_torch.grad_scaler import MeshGradScaler
from slapo_torch.precision import ModelPrecision
from slapo_torch.seen_dtypes import EnginePrecision, FirstStep

if TYPE_CHECKING:
    from slapo_core import Plan
    from slapo_runtime.context import BuildContext

SCALER = "grad_scaler"
"""The name of a scaler's state in a checkpoint."""


class PreciseEngine(StatefulEngine):
    """Store parameters, compute and step in a precision.

    Attributes:
        precision: the preset, and the types that the first training step showed; None without the option.
        scaler: the GradScaler of ``"fp16-mixed"``; None for other presets.
    """

    precision: EnginePrecision | None = None
    scaler: MeshGradScaler | None = None
    _context: BuildContext
    _first: FirstStep | None = None

    def _materialize(self, plan: Plan, context: BuildContext) -> bool:
        """Give the model its values in the types of the precision, and return whether they will be sharded."""
        device, replicas = context.model_device, data_ranks(context.schedule.mesh)
        self._precision = ModelPrecision(context.schedule, plan.config, device)
        shards = is_sharded(context.schedule, self._precision, plan.config)
        by_rows = shards and replicas > 1 and not context.stage_ranks
        materialize(context, by_rows=by_rows, dtype=self._precision.wanted)
        preset = self._precision.preset
        if preset is None:
            return shards
        self.precision = EnginePrecision(preset.name, self._precision.islands)
        self._first = FirstStep(context.schedule, self._precision)
        if preset.scales_loss:
            self.scaler = MeshGradScaler(device, context.schedule.mesh)
        return shards

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Note the types of the first training step."""
        first = self._first
        if first is None:
            yield
            return
        first.begin()
        try:
            yield
        except Exception as error:
            first.explain(error)
            raise
        finally:
            first.end()

    @contextlib.contextmanager
    def _lowered(self) -> Iterator[None]:
        """Compute forward and loss in the precision."""
        with self._precision.forward():
            if self._first is not None:
                self._first.in_forward()
            yield

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for the backward."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _update(self, at: Callable[[str], None] = lambda what: None) -> torch.Tensor | None:
        """Clip the gradients, and step the optimizer and the scheduler of the learning rate.

        A step with a gradient that is not finite is skipped by the scaler, on all ranks, and by the scheduler; its norm
        is inf or nan.

        Args:
            at: called with the present work.

        Returns:
            the norm of the gradients before clipping.

        Raises:
            BuildError: in the first step: a type is not the promised one.
        """
        optimizer, scaler, first = self.optimizer, self.scaler, self._first
        if first is not None:
            first.before_update(optimizer)
        at("clipping gradients")
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = self._context.clip_gradients()
        at("the step of the optimizer")
        is_skipped = False
        if scaler is None:
            optimizer.step()
        else:
            is_skipped = bool(scaler.found_inf)  # before the step, for which the host would wait, too
            scaler.step(optimizer)
            scaler.update()
        if self.lr_scheduler is not None and not is_skipped:
            self.lr_scheduler.step()
        if first is not None and not is_skipped:
            self.precision, self._first = first.after_update(optimizer), None
        return norm

    # -- state; see StatefulEngine ------------------------------------------------------------------------------

    def _runtime_state(self) -> Mapping[str, Any]:
        own = {} if self.scaler is None else {SCALER: self.scaler.state_dict()}
        return {**super()._runtime_state(), **own}

    def _loaded_names(self) -> Collection[str]:
        return (*super()._loaded_names(), *(() if self.scaler is None else (SCALER,)))

    def _load_runtime_state(self, runtime: Mapping[str, Any]) -> None:
        super()._load_runtime_state(runtime)
        if self.scaler is None:
            return
        if SCALER in runtime:
            self.scaler.load_state_dict(dict(runtime[SCALER]))
        else:
            warnings.warn(
                "the checkpoint holds no state of a GradScaler: the scale of the loss starts at its initial value",
                stacklevel=4,
            )
