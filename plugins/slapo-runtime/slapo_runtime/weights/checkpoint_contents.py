"""Collect, compare and assign the contents of a checkpoint, in any format."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import BuildError, ReplicaError, warn_user
from slapo_runtime.correspondence.storage import optimizer_storage
from slapo_runtime.ranks.world import together
from slapo_runtime.weights.module_state import extra_states, packed
from slapo_runtime.weights.optimizer_state import OptimizerState
from slapo_runtime.weights.sources import WeightsSource

if TYPE_CHECKING:
    from slapo_runtime.correspondence.storage import LiveTensor, OptimizerStorage
    from slapo_runtime.weights.state import Loading, ModelState


COUNTERS = "counters"  # the name in a runtime's saved state that may be unused


def as_written(error: ReplicaError, directory: str | os.PathLike[str]) -> ReplicaError:
    """Return an error with a note that the first rank's values were written."""
    path = os.fspath(directory)
    text = f"{error.message}\n'{path}' was written with the values of the first rank"
    return ReplicaError(text, tensor=error.tensor, ranks=error.ranks, directory=path, hint=error.hint)


def collect_optimizer_state(
    state: ModelState, optimizer: torch.optim.Optimizer | OptimizerStorage | None
) -> OptimizerState | None:
    """Collect an optimizer's state, not yet merged over ``pp``: a collective; None without one."""
    moments: OptimizerState | None = None
    with together(state.mesh, "collecting the optimizer's state"):
        storage = optimizer_storage(optimizer)
        if storage is not None:
            moments = OptimizerState(state, storage)
    if moments is not None:
        moments.gather_ranks()
    return moments


def prepare_loading(
    state: ModelState,
    weights: WeightsSource,
    added: WeightsSource | None,
    moments: OptimizerState | None,
    about_optimizer: Mapping[str, Any] | None,
    tensors: WeightsSource | None,
    runtime: Mapping[str, Any],
    uses: Collection[str],
    label: str,
) -> Loading:
    """Check a checkpoint against the engine, and read this rank's shards, without changes.

    Args:
        state: of the model.
        weights: of the checkpoint.
        added: tensors that steps added.
        moments: of the engine's optimizer, merged; None without one. It is prepared, too.
        about_optimizer: the description of the checkpoint's optimizer; None without one.
        tensors: of its state.
        runtime: of the checkpoint.
        uses: the names in ``runtime`` that the engine loads.
        label: of the checkpoint, for messages.
    """
    loading = state.prepare(weights)
    for live in fitting_added(state, added):
        assert added is not None
        loading.take(live, added.read(live.name, live.layout, state.mesh))
    if moments is not None:
        prepare_optimizer(moments, about_optimizer, tensors, label)
    warn_of_unused(runtime, uses, label)
    return loading


def prepare_optimizer(
    moments: OptimizerState, about: Mapping[str, Any] | None, tensors: WeightsSource | None, label: str
) -> None:
    """Compare an optimizer with the saved one, and prepare to load its state; arguments as above."""
    if about is None:
        raise BuildError(
            f"{label} holds no optimizer state, but this engine has an optimizer",
            hint="load the weights only: build(sch, weights=dir)",
        )
    moments.prepare(about, tensors)


def warn_of_unused(runtime: Mapping[str, Any], uses: Collection[str], label: str) -> None:
    """Warn of saved state that the engine does not load; arguments as above."""
    unused = sorted(set(runtime) - set(uses) - {COUNTERS})
    if unused:
        warn_user(f"{label}: ignored, unknown to this engine: {', '.join(unused)}")


def assign_loaded(state: ModelState, moments: OptimizerState | None, loading: Loading, label: str) -> None:
    """Assign the prepared values: a collective."""
    assign_optimizer(state, moments, label)
    loading.assign()


def assign_optimizer(state: ModelState, moments: OptimizerState | None, label: str) -> None:
    """Assign the prepared state of an optimizer: a collective.

    It comes before the weights, because an optimizer may refuse its state, and then keeps the former one.
    """
    if moments is None:
        return
    try:
        with together(state.mesh, f"loading the optimizer's state of {label}"):
            moments.load()
    except BaseException:
        moments.take_back()
        raise


def packed_extra_states(state: ModelState) -> dict[str, str]:
    """Return the modules' extra state, encoded: a collective."""
    extra = extra_states(state.correspondence, compare=state.is_spread)
    with together(state.mesh, "saving the modules' extra state"):
        return packed(extra)


def refuse_not_json(runtime: Mapping[str, Any]) -> None:
    """Refuse a runtime's state that JSON cannot hold."""
    try:
        json.dumps(runtime, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BuildError(
            f"the runtime's state must be JSON-serializable: {error}",
            hint="lr_scheduler.state_dict() must hold numbers, strings, lists and dictionaries",
        ) from error


def fitting_added(state: ModelState, added: WeightsSource | None) -> list[LiveTensor]:
    """Return this rank's tensors that steps added and a checkpoint holds, and warn of others."""
    shapes = added.shapes() if added is not None else {}
    live = {tensor.name: tensor for tensor in state.correspondence.added()}
    fitting = [name for name, tensor in live.items() if shapes.get(name) == tuple(tensor.layout.shape)]
    for names, what in (
        (set(live) - set(fitting), "not in the checkpoint: they keep their values"),
        (set(shapes) - set(fitting), "in the checkpoint, but not in this schedule"),
    ):
        if names:
            warn_user(f"tensors added by replacements, {what}: {', '.join(sorted(names))}")
    return [live[name] for name in fitting if live[name].is_local]
