"""Share state, refusals and DeepSpeed's engine between both engines of target ``"deepspeed"``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core import Plan
from slapo_deepspeed.external_changes import BetweenDeepSpeedSteps
from slapo_deepspeed.state.parameter_groups import Groups
from slapo_runtime.engine import StatefulEngine

if TYPE_CHECKING:
    from slapo_deepspeed.state.optimizer import DeepSpeedOptimizer
    from slapo_runtime.context import BuildContext


class DeepSpeedEngine(StatefulEngine):
    """State dicts and checkpoints by the context's state, read out of where DeepSpeed keeps it.

    Args:
        plan: of the build; ``plan.config["config"]`` is DeepSpeed's completed configuration.
        context: from ``build``.
        engine: DeepSpeed's, made by ``deepspeed.initialize``, in its last form.
        groups: of the optimizer before DeepSpeed saw it; None for one that DeepSpeed made.

    Attributes:
        deepspeed: that one, for everything else that users do with it: gradients by ``deepspeed.utils``, its own
            checkpoints, its scheduler.
    """

    def __init__(self, plan: Plan, context: BuildContext, engine: Any, groups: Groups | None = None) -> None:
        from slapo_deepspeed.state.flat_layout import places_of
        from slapo_deepspeed.state.optimizer import DeepSpeedOptimizer
        from slapo_deepspeed.state.tensors import DeepSpeedTensors
        from slapo_deepspeed.state.universal import describe

        self.plan, self.deepspeed = plan, engine
        self._context, self._state = context, context.state
        mesh, device = context.schedule.mesh, torch.device(engine.device)
        places = places_of(engine)
        here = [live for live in context.state.tensors() if live.is_local]
        self._storage: DeepSpeedOptimizer | None = None
        if places.inner is not None:
            if groups is None:
                groups = Groups.one(live.tensor for live in here if live.is_parameter)
            groups.check_stages(mesh)
            names = {id(live.tensor): live.reference_name for live in here}
            self._storage = DeepSpeedOptimizer(places, groups, names, mesh, device)
        tensors = DeepSpeedTensors(places, mesh, device)
        context.state.keep_in(tensors)
        self._between = BetweenDeepSpeedSteps(context, engine, tensors)
        describe(engine, context)
        self._is_closed = False

    @property
    def module(self) -> nn.Module:
        return self._context.schedule.model

    @property
    def optimizer(self) -> Any:  # type: ignore[override]
        """DeepSpeed's optimizer; None where the engine only evaluates, or is closed."""
        return self.deepspeed.optimizer if self._storage is not None and not self._is_closed else None

    def close(self) -> None:
        """End what DeepSpeed hangs on the model; the model and its state stay."""
        if self._is_closed:
            return
        self._is_closed = True
        from slapo_deepspeed.state.universal import forget

        forget(self.deepspeed)
        self.deepspeed.destroy()
        self._release()

    # -- for the engines ----------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Release the engine's own state, apart from DeepSpeed's; called once, after that ended."""

    def _require_open(self) -> None:
        if self._is_closed:
            raise self._closed()

    # -- state; documented in slapo_core/engine.py -------------------------------------------------------

    def _kept_optimizer(self) -> DeepSpeedOptimizer | None:
        return None if self._is_closed else self._storage

    def _beside(self) -> Mapping[str, Any]:
        from slapo_deepspeed.state.extra_state import read_extra_state

        return read_extra_state(self.deepspeed) if self._kept_optimizer() is not None else {}

    def _uses(self) -> Collection[str]:
        from slapo_deepspeed.state.extra_state import used_extra_state

        return used_extra_state(self.deepspeed) if self._kept_optimizer() is not None else ()

    def _resume(self, runtime: Mapping[str, Any]) -> None:
        from slapo_deepspeed.state.extra_state import write_extra_state

        if self._kept_optimizer() is not None:
            write_extra_state(self.deepspeed, runtime)
