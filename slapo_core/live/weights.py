"""The weights of a scheduled model in the reference model's names and shapes: out, in, and into files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slapo_core.errors import ArgumentError, ReplicaError
from slapo_core.live.export import export_plain, export_with
from slapo_core.live.session import live_state
from slapo_core.ranks.world import together
from slapo_core.weights.checkpoint import as_written, writing
from slapo_core.weights.configurations import write_configurations

if TYPE_CHECKING:
    import torch

    from slapo_core.schedule.schedule import Schedule

__all__ = ["load_state_dict", "save_pretrained", "state_dict"]


def state_dict(sch: Schedule, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, torch.Tensor]:
    """The reference model's state dict, with the values that the scheduled model has now.

    In place of ``model.state_dict()``, which gives this rank's pieces. A collective: every rank calls it.

    Args:
        sch: the schedule, under which the model is trained without :func:`slapo_core.build`.
        rank0_only: other ranks take part but return an empty dictionary.
        include_added: also give what a step added, under its own name; without, a warning names it once.

    Returns:
        copies on the CPU, with the reference model's keys in its order; tied names share one tensor.

    Raises:
        ArgumentError: something else than a schedule.
        SealedError: the schedule was built; ``engine.state_dict()`` gives the weights there.
        WeightsError: a tensor that nobody explains, or one on the meta device.
        ReplicaError: replicas differ between ranks; its ``state_dict`` holds this rank's.
    """
    return live_state(sch, "state_dict").state_dict(rank0_only=rank0_only, include_added=include_added)


def load_state_dict(sch: Schedule, state: Mapping[str, torch.Tensor]) -> None:
    """Give a scheduled model the weights of a reference model; every rank keeps its own pieces.

    In place of ``model.load_state_dict()``, which wants this rank's pieces. A collective: every rank calls it, with the
    same state. The tensors of the model stay the same objects, so that its optimizer goes on.

    Args:
        sch: the schedule, under which the model is trained without :func:`slapo_core.build`.
        state: full tensors by the reference model's names, as of its ``state_dict()``.

    Raises:
        ArgumentError: something else than a schedule.
        SealedError: the schedule was built; ``engine.load_state_dict()`` loads there.
        WeightsError: missing or unexpected names, or other shapes; nothing was changed.
    """
    live_state(sch, "load_state_dict").load_state_dict(state)


def save_pretrained(
    sch: Schedule, directory: str | os.PathLike[str], *, max_shard_size: int | str | None = None
) -> None:
    """Write the weights of a scheduled model as safetensors, as the reference model would have been saved.

    A model with a ``save_pretrained`` of its own (transformers') writes itself, in its untouched form: with its
    ``config.json``, so that ``AutoModel.from_pretrained(directory)`` gives the reference model with the trained values.
    Of any other model the directory holds ``model.safetensors``, or several files and their index. A collective: every
    rank calls it, and the first one writes.

    Args:
        sch: the schedule, under which the model is trained without :func:`slapo_core.build`.
        directory: made if it is not there.
        max_shard_size: the largest file, in bytes, or as in ``"5GB"``; None is transformers' own limit, or no limit.

    Raises:
        ArgumentError: something else than a schedule, or a size that is none.
        SealedError: the schedule was built; ``engine.save()`` saves there.
        WeightsError: a tensor that nobody explains, or one on the meta device.
        ReplicaError: replicas differ between ranks; the values of the first rank were written.
        BuildError: writing failed on the first rank.
    """
    state = live_state(sch, "save_pretrained")
    if not os.fspath(directory):
        raise ArgumentError("the directory to write to is empty", hint='slapo_core.save_pretrained(sch, "trained")')
    differing = None
    try:
        weights = state.state_dict(rank0_only=True)
    except ReplicaError as error:
        differing, weights = as_written(error, directory), error.state_dict or {}
    with together(state.mesh, f"writing the model into '{os.fspath(directory)}'"):
        if state.mesh is None or state.mesh.is_first_rank:
            with writing(directory):
                _write(sch, weights, directory, max_shard_size)
    if differing is not None:
        raise differing


def _write(
    sch: Schedule,
    weights: Mapping[str, torch.Tensor],
    directory: str | os.PathLike[str],
    max_shard_size: int | str | None,
) -> None:
    if sch.is_sealed:  # the reference model cannot be had any more, to write itself
        export_plain(weights, directory, max_shard_size)
        write_configurations(sch.model, Path(directory))
    elif callable(getattr(sch.model, "save_pretrained", None)):
        with sch.untouched() as model:
            export_with(model, weights, directory, max_shard_size)
    else:
        export_plain(weights, directory, max_shard_size)
