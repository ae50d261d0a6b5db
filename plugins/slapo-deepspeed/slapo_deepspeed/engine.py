"""Share state, refusals and DeepSpeed's engine between both engines of target ``"deepspeed"``."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core import BuildError, Plan
from slapo_deepspeed.external_changes import BetweenDeepSpeedSteps
from slapo_deepspeed.state import (
    DeepSpeedOptimizer,
    DeepSpeedTensors,
    Group,
    check_stages,
    groups_of,
    held_by,
    read_extra_state,
    unsaved,
    used_extra_state,
    write_extra_state,
)
from slapo_runtime.engine import StatefulEngine
from slapo_runtime.flat_storage import FlatStorage

if TYPE_CHECKING:
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

    def __init__(self, plan: Plan, context: BuildContext, engine: Any, groups: Sequence[Group] | None = None) -> None:
        self.plan, self.deepspeed = plan, engine
        self._context, self._state = context, context.state
        mesh, device = context.schedule.mesh, torch.device(engine.device)
        here = [live for live in context.state.tensors() if live.is_local]
        parameters = [live.tensor for live in here if live.is_parameter]
        self._unsaved, self._has_weights = unsaved(engine)
        storage = FlatStorage(held_by(engine, parameters) if self._has_weights else {}, mesh, device)
        self._storage: DeepSpeedOptimizer | None = None
        if engine.basic_optimizer is not None:
            if groups is None:
                groups = groups_of([{"params": parameters}], keeps_first=True)
            check_stages(groups, mesh)
            if not self._unsaved:
                names = {id(live.tensor): live.reference_name for live in here}
                self._storage = DeepSpeedOptimizer(engine, storage, groups, names)
        tensors = DeepSpeedTensors(storage)
        context.state.keep_in(tensors)
        self._between = BetweenDeepSpeedSteps(context, engine, tensors)
        self._is_closed = False

    @property
    def module(self) -> nn.Module:
        return self._context.schedule.model

    @property
    def optimizer(self) -> Any:  # type: ignore[override]
        """DeepSpeed's optimizer; None where the engine only evaluates, or is closed."""
        trains = self.deepspeed.basic_optimizer is not None and not self._is_closed
        return self.deepspeed.optimizer if trains else None

    def close(self) -> None:
        """End what DeepSpeed hangs on the model; the model and its state stay."""
        if self._is_closed:
            return
        self._is_closed = True
        self.deepspeed.destroy()
        self._release()

    # -- for the engines ----------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Release the engine's own state, apart from DeepSpeed's; called once, after that ended."""

    def _require_open(self) -> None:
        if self._is_closed:
            raise self._closed()

    # -- state; documented in slapo_core/engine.py -------------------------------------------------------

    def state_dict(self, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, torch.Tensor]:
        self._require_weights("state_dict()")
        return super().state_dict(rank0_only=rank0_only, include_added=include_added)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._require_weights("load_state_dict()")
        super().load_state_dict(state)

    def check_replicas(self, *, repair: bool = False) -> None:
        self._require_weights("check_replicas()")
        super().check_replicas(repair=repair)

    def save(self, directory: str | os.PathLike[str]) -> None:
        if self._unsaved:
            raise self._cannot("save()")
        super().save(directory)

    def load(self, directory: str | os.PathLike[str]) -> None:
        if self._unsaved:
            raise self._cannot("load()")
        super().load(directory)

    def _require_weights(self, what: str) -> None:
        if not self._has_weights:
            raise self._cannot(what)

    def _cannot(self, what: str) -> BuildError:
        return BuildError(
            f"engine.{what} cannot express {self._unsaved} by the names of the reference model",
            hint="engine.deepspeed.save_checkpoint(directory), and load_checkpoint(directory) on the same mesh",
        )

    def _kept_optimizer(self) -> DeepSpeedOptimizer | None:
        return None if self._is_closed else self._storage

    def _beside(self) -> Mapping[str, Any]:
        return read_extra_state(self.deepspeed) if self._kept_optimizer() is not None else {}

    def _uses(self) -> Collection[str]:
        return used_extra_state(self.deepspeed) if self._kept_optimizer() is not None else ()

    def _resume(self, runtime: Mapping[str, Any]) -> None:
        if self._kept_optimizer() is not None:
            write_extra_state(self.deepspeed, runtime)
