"""Train a scheduled model in your own loop: gradients, weights, optimizer state."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slapo_core import Schedule
from slapo_core.errors import ArgumentError, ReplicaError, SealedError, warn_user
from slapo_core.internals import Internals, parameters_of
from slapo_runtime.gradients import GradientClipper
from slapo_runtime.ranks.world import together
from slapo_runtime.replicas import check_replicas, optimizer_replicas
from slapo_runtime.weights.checkpoint_contents import as_written, assign_loaded, collect_optimizer_state
from slapo_runtime.weights.files import export_plain, write_configurations, writing
from slapo_runtime.weights.full_matrix import FullMatrixSteps
from slapo_runtime.weights.optimizer import BY_PARAMETER, ELEMENTWISE
from slapo_runtime.weights.parameter_groups import ParameterGroups
from slapo_runtime.weights.sources import MappingSource
from slapo_runtime.weights.state import Loading, ModelState


def live_state(schedule: Schedule, call: str) -> ModelState:
    """Return the state of a schedule's model, by the reference model's names and shapes.

    Args:
        schedule: not built.
        call: the user's call, e.g. ``"clip_grad_norm_"``, for messages.

    Raises:
        ArgumentError: not a schedule, e.g. its model.
        SealedError: the schedule was built, or sealed before any of these functions was called; or its steps are undone
            by a ``with`` block.
        WeightsError: an unexplained tensor.
    """
    if not isinstance(schedule, Schedule):
        raise ArgumentError(
            f"{call} takes the schedule (got {type(schedule).__name__})",
            hint=f"sch = slapo.create_schedule(model, mesh=...); slapo.{call}(sch, ...)",
        )
    _reshard(schedule.model)
    kept = Internals(schedule).cache(call)
    state = kept.get(_STATE_KEY)
    if state is None:
        if schedule.is_sealed:
            raise SealedError(
                f"cannot call {call}: the schedule was built or sealed, and its engine owns the correspondence now",
                hint="of a built model: engine.state_dict(), engine.load_state_dict(), build(..., max_grad_norm=1.0); "
                f"without build: call {call} once before sch.seal()",
            )
        state = kept[_STATE_KEY] = ModelState.of(schedule)
    assert isinstance(state, ModelState)
    return state


def _reshard(model: torch.nn.Module) -> None:
    """Reshard parameters under ``fully_shard``, which are gathered after an evaluation."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # its import takes half a second
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


_STATE_KEY = "slapo_runtime.weights.live"
_CLIP = "clip_grad_norm_"


def clip_grad_norm_(
    sch: Schedule, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the gradients of a scheduled model by their norm over all ranks.

    Use it instead of ``torch.nn.utils.clip_grad_norm_``, which only sees the shards of one rank, with another norm on
    every rank. Shards are counted on all ranks, replicas and tied tensors once. A collective: every rank calls it,
    after the gradients of the replicas (``dp``) were averaged.

    Args:
        sch: the schedule, under which the model is trained without :func:`slapo_core.build`.
        max_norm: the largest norm, not negative; ``math.inf`` only measures.
        norm_type: p of the p-norm, positive; ``math.inf`` is the largest absolute value.
        error_if_nonfinite: raise instead of scaling by an infinite or NaN norm.

    Returns:
        the norm before clipping, a scalar tensor, the same on every rank.

    Raises:
        ArgumentError: not a schedule, or an invalid number.
        SealedError: the schedule was built; ``build(max_grad_norm=...)`` clips there.
        WeightsError: an unexplained tensor.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; on every rank, and nothing was scaled.
    """
    correspondence = live_state(sch, _CLIP).correspondence
    if math.isnan(max_norm) or max_norm < 0:
        raise ArgumentError(f"max_norm must not be negative (got {max_norm})", hint="clip_grad_norm_(sch, 1.0)")
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ArgumentError(
            f"norm_type must be positive (got {norm_type})", hint="norm_type=2.0, or math.inf for the largest value"
        )
    kept, modules = Internals(sch).cache(_CLIP), correspondence.tree.index.modules.values()
    held = [
        tuple(map(id, parameters_of(module).values())) for module in modules
    ]  # others after load_state_dict(assign)
    settings = (float(max_norm), norm_type, error_if_nonfinite)
    if kept.get(_CLIPPER_KEY, ())[:2] != (held, settings):
        clipper = GradientClipper(
            correspondence, settings[0], norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )
        kept[_CLIPPER_KEY] = (held, settings, clipper)
    norm: torch.Tensor = kept[_CLIPPER_KEY][2].clip()
    return norm


_CLIPPER_KEY = "slapo_runtime.weights.live.clipper"


def state_dict(sch: Schedule, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, Any]:
    """Return the reference model's state dict, with the present values of the scheduled model.

    Use it instead of ``model.state_dict()``, which gives this rank's shards. A collective: every rank calls it.

    Args:
        sch: the schedule, under which the model is trained without :func:`slapo_core.build`.
        rank0_only: other ranks take part but return an empty dictionary.
        include_added: include tensors that steps added, under their own names; else a warning names them once.

    Returns:
        copies on the CPU, with the reference model's keys in its order; tied names share one tensor. Extra state of
        modules (``get_extra_state``) is included, as in torch, and need not be a tensor.

    Raises:
        ArgumentError: not a schedule.
        SealedError: the schedule was built; ``engine.state_dict()`` gives the weights there.
        WeightsError: an unexplained tensor, or one on the meta device.
        ReplicaError: replicas differ between ranks; its ``state_dict`` holds this rank's.
    """
    return live_state(sch, "state_dict").state_dict(rank0_only=rank0_only, include_added=include_added)


def load_state_dict(sch: Schedule, state: Mapping[str, Any] | str | os.PathLike[str]) -> None:
    """Load a reference model's weights; every rank keeps its own shards.

    Use it instead of ``model.load_state_dict()``, which takes this rank's shards. A collective: every rank calls it,
    with the same state. The tensors of the model stay the same objects, so that its optimizer remains valid.

    Args:
        sch: the schedule, under which the model is trained without :func:`slapo_core.build`.
        state: full tensors by the reference model's names, as of its ``state_dict()``; or a directory of
            ``save_pretrained``, of which each rank reads its own shards.

    Raises:
        ArgumentError: not a schedule.
        SealedError: the schedule was built; ``engine.load_state_dict()`` loads there.
        WeightsError: missing or unexpected names, wrong shapes, or a model on the meta device, without memory for them;
            nothing was changed.
    """
    live_state(sch, "load_state_dict").load_state_dict(state)


def parameter_groups(
    sch: Schedule, *, no_decay: Sequence[str] | str = (), param_groups: Mapping[str, Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Return the parameters of a scheduled model in groups of an optimizer, by reference names.

    ``torch.optim.AdamW(slapo.parameter_groups(sch, no_decay=("*.bias", "*norm*")), lr=1e-4)``: call it after the last
    step, and after :func:`slapo_core.fully_shard`. The groups are the same on every rank and under every mesh; no
    collective.

    Args:
        sch: the schedule, under which the model is trained without :func:`slapo_core.build`.
        no_decay: patterns (:mod:`fnmatch`) of the parameters with ``weight_decay=0.0``.
        param_groups: settings by pattern, e.g. ``{"lm_head.*": {"lr": 1e-5}}``. A parameter has the settings of all
            patterns that it matches by one of its names; for the same setting, the first one's.

    Returns:
        groups of ``torch.optim``, first the parameters without a match; frozen parameters are included.

    Raises:
        ArgumentError: not a schedule.
        SealedError: the schedule was built; ``build(no_decay=..., param_groups=...)`` makes groups there.
        OptimizerError: a pattern matches no parameter, has no effect, or contradicts another; or a parameter holds
            several reference tensors with different settings.
        WeightsError: an unexplained tensor.
    """
    state = live_state(sch, "parameter_groups")
    groups = ParameterGroups(state, no_decay, param_groups)
    return groups.of(live.tensor for live in state.tensors() if live.is_parameter)  # type: ignore[misc]


def gather_full_matrices(sch: Schedule, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of full matrices (Adafactor, Muon) gather split parameters in its steps.

    Element-wise ones stay as they are; an unknown one gets shards, with a warning.

    Args:
        sch: the schedule.
        optimizer: over the model's parameters, before its first step. Its state is in :func:`optimizer_state_dict`
            afterwards, and no longer in its own ``state_dict()``.
    """
    if sch.mesh is None or sch.mesh.world_size == 1:
        return
    kind, state = type(optimizer), live_state(sch, "gather_full_matrices")
    package = kind.__module__.partition(".")[0]
    answer = Internals(sch).hooks.single("slapo_full_matrix", optimizer=kind)
    if kind.__name__ in BY_PARAMETER.get(package, ()) or (answer is not None and answer[1]):
        FullMatrixSteps(optimizer, state)
    elif kind.__name__ not in ELEMENTWISE.get(package, ()) and state.sharded_axes():
        warn_user(
            f"{kind.__name__} is not known to be element-wise: each rank updates its shards alone, which is right only "
            "if an element's update depends on that element's own gradients; the hook slapo_full_matrix declares an "
            "optimizer that needs full parameters"
        )


def optimizer_state_dict(
    sch: Schedule, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False
) -> dict[str, Any]:
    """Return an optimizer's state by the reference model's names, in full tensors.

    Use it instead of ``optimizer.state_dict()``, which gives the state of this rank's shards. The state can be loaded
    into an optimizer of the same model under any schedule, mesh and ``fully_shard``. A collective: every rank calls it.

    Args:
        sch: the schedule, under which the model is trained without :func:`slapo_core.build`.
        optimizer: of torch, over the model's parameters.
        rank0_only: other ranks take part but return an empty dictionary.

    Returns:
        ``{"type": "AdamW", "state": {"fc.weight": {"exp_avg": ..., "step": ...}}, "param_groups": [{"params":
        ["fc.weight"], "lr": 1e-3, ...}]}``, with copies on the CPU, and the first names of tied parameters: a full
        state dict as of ``torch.distributed.checkpoint.state_dict``.

    Raises:
        ArgumentError: not a schedule, or not an optimizer of torch.
        SealedError: the schedule was built; ``engine.save()`` saves the optimizer there.
        OptimizerError: it holds foreign parameters, e.g. from before a step.
        ReplicaError: replicas of the state differ between ranks.
        BuildError: a sharded parameter has a state tensor of another shape that is not a scalar.
    """
    state = _optimized(sch, optimizer, "optimizer_state_dict")
    check_replicas(state.mesh, optimizer_replicas(state.correspondence, optimizer), hint=state.hint)
    moments = collect_optimizer_state(state, optimizer)
    assert moments is not None
    wanted = not rank0_only or state.is_first_rank
    tensors = moments.gather(wanted=wanted)
    return moments.nested(tensors) if wanted else {}


def load_optimizer_state_dict(sch: Schedule, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state of :func:`slapo_core.optimizer_state_dict`; every rank keeps its own shards.

    Use it instead of ``optimizer.load_state_dict()``, which does not distinguish full tensors from shards. A
    collective: every rank calls it, with the same state.

    Args:
        sch: the schedule, under which the model is trained without :func:`slapo_core.build`.
        optimizer: of the same class, over the model's parameters; its groups may differ, if each of them has one value
            of every setting in the state.
        state: of an optimizer of the same model, under any schedule.

    Raises:
        ArgumentError: not a schedule, not an optimizer of torch, or a state by numbers, as torch's own.
        SealedError: the schedule was built; ``engine.load()`` loads there.
        OptimizerError: it holds foreign parameters.
        BuildError: the state has another class or other parameters; nothing was changed.
    """
    own = _optimized(sch, optimizer, "load_optimizer_state_dict")
    _check_nested(state)
    moments = collect_optimizer_state(own, optimizer)
    assert moments is not None
    label = "the optimizer's state"
    with together(own.mesh, f"reading {label}"):
        description, tensors = moments.flat(state)
        moments.prepare(description, MappingSource(tensors, label=label))
    assign_loaded(own, moments, Loading(own), label)


def _optimized(sch: Schedule, optimizer: torch.optim.Optimizer, call: str) -> ModelState:
    state = live_state(sch, call)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"{call} takes an optimizer of torch (got {type(optimizer).__name__})",
            hint=f"slapo.{call}(sch, optimizer); for a wrapper, e.g. accelerate's, its .optimizer",
        )
    state.check_unchanged()
    return state


def _check_nested(state: Mapping[str, Any]) -> None:
    parts = [state.get(key) for key in ("state", "param_groups")] if isinstance(state, Mapping) else []
    if not parts or not isinstance(parts[0], Mapping) or not isinstance(parts[1], Sequence):
        raise ArgumentError(
            f"state must have 'state' and 'param_groups' (got {list(state) if isinstance(state, Mapping) else state})",
            hint="give a state of slapo.optimizer_state_dict(sch, optimizer)",
        )
    if not all(isinstance(name, str) for name in (*parts[0], *(one for group in parts[1] for one in group["params"]))):
        raise ArgumentError(
            "the state has parameters by number, as from torch's optimizer.state_dict(): its tensors are the shards of "
            "one rank",
            hint="save slapo.optimizer_state_dict(sch, optimizer)",
        )


def save_pretrained(
    sch: Schedule, directory: str | os.PathLike[str], *, max_shard_size: int | str | None = None
) -> None:
    """Save the weights of a scheduled model as safetensors, in the reference model's format.

    A model with its own ``save_pretrained`` (transformers) writes itself, as the reference model: with its
    ``config.json``, so that ``AutoModel.from_pretrained(directory)`` gives the reference model with the trained values.
    For other models the directory holds ``model.safetensors``, or several files and their index. A collective: every
    rank calls it, and the first one writes.

    Args:
        sch: the schedule, under which the model is trained without :func:`slapo_core.build`.
        directory: made if it does not exist.
        max_shard_size: the largest file, in bytes, or as in ``"5GB"``; None: transformers' default, or no limit.

    Raises:
        ArgumentError: not a schedule, or an invalid size.
        SealedError: the schedule was built; ``engine.save()`` saves there.
        WeightsError: an unexplained tensor, or one on the meta device.
        ReplicaError: replicas differ between ranks; the values of the first rank were written.
        BuildError: writing failed on the first rank.
    """
    state = live_state(sch, "save_pretrained")
    if not os.fspath(directory):
        raise ArgumentError("the directory to write to is empty", hint='slapo.save_pretrained(sch, "trained")')
    differing = None
    try:
        weights = state.state_dict(rank0_only=True)
    except ReplicaError as error:
        differing, weights = as_written(error, directory), error.state_dict or {}
    try:
        with together(state.mesh, f"writing the model into '{os.fspath(directory)}'"):
            if state.is_first_rank:
                with writing(directory):
                    _write(sch, _tensors(weights), directory, max_shard_size)
    finally:
        own_mesh = state.own_mesh  # of fully_shard, without a schedule's mesh: its ranks wait for the first one
        for number in range(own_mesh.ndim if own_mesh is not None else 0):
            dist.barrier(own_mesh.get_group(number))  # type: ignore[union-attr]
    if differing is not None:
        raise differing


def _tensors(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Leave out objects other than tensors, with a warning."""
    other = [key for key, value in weights.items() if not isinstance(value, torch.Tensor)]
    if other:
        warn_user(
            "extra state of modules is not in the files, because safetensors hold tensors only: "
            f"{', '.join(other)}; torch.save(slapo.state_dict(sch), file) includes it",
        )
    return {key: value for key, value in weights.items() if key not in other}


def _write(
    sch: Schedule,
    weights: Mapping[str, torch.Tensor],
    directory: str | os.PathLike[str],
    max_shard_size: int | str | None,
) -> None:
    if sch.is_sealed:  # without a reference model, which would write itself
        export_plain(weights, directory, max_shard_size)
        write_configurations(sch.model, Path(directory))
    elif callable(getattr(sch.model, "save_pretrained", None)):
        options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        with sch.reference() as model:
            own: Any = model
            own.save_pretrained(directory, state_dict=dict(weights), **options)
    else:
        export_plain(weights, directory, max_shard_size)
