"""The output for a whole batch, put together of what stages made of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from slapo_core.native.pipeline.stage import Work
    from slapo_core.spec.pipeline import Partition

__all__ = ["gather_output"]


def gather_output(
    partition: Partition,
    whole: Partition,
    work: Work,
    ranks: Sequence[int],
    rank: int,
    group: Any,
    *,
    device: torch.device,
    count: int,
) -> tuple[Any, str]:
    """The output for the whole batch, on every rank: a collective over the stages.

    Args:
        partition: for a micro-batch.
        whole: for the whole batch, which says what shapes the pieces have to get.
        work: what the stages of this rank kept.
        ranks: which rank along ``pp`` runs each stage.
        rank: this one.
        group: of these ranks.
        device: where stages compute.
        count: of micro-batches.

    Returns:
        the output, and on every rank alike why it cannot be put together; "" where it can.
    """
    pieces, problem = {}, ""
    for name in partition.output.pieces:
        value, owner = partition.values[name], ranks[partition.values[name].producer]
        shape = whole.values[name].shape
        axis = _axis(value.shape, shape, count)
        parts = [work.outputs[name][number] for number in range(count)] if rank == owner else []
        fits = axis is not None or shape == value.shape
        if fits and axis is None and value.shape and count > 1:  # what each micro-batch has as a whole
            alike = torch.tensor([all(torch.equal(part, parts[0]) for part in parts)], device=device)
            _broadcast(alike, owner, group)
            fits = bool(alike)
        if not fits:
            problem = problem or (
                f"the piece '{name}' of the output is {value.shape} for a micro-batch and {shape} for the whole batch, "
                "so it cannot be put together of the micro-batches'"
            )
            continue
        joined = _together(parts, axis).contiguous() if parts else torch.empty(shape, dtype=value.dtype, device=device)
        _broadcast(joined, owner, group)
        pieces[name] = joined
    return (None, problem) if problem else (partition.output.assemble(pieces), "")


def _together(parts: list[torch.Tensor], axis: int | None) -> torch.Tensor:
    if axis is not None:
        return torch.cat(parts, axis)
    if parts[0].dim() == 0 and parts[0].is_floating_point():
        return torch.stack(parts).mean(0)  # a loss
    return parts[0]


def _axis(shape: tuple[int, ...], whole: tuple[int, ...], count: int) -> int | None:
    """The one axis along which micro-batches make the whole batch; None where there is none."""
    if len(shape) != len(whole):
        return None
    axes = [axis for axis, sizes in enumerate(zip(shape, whole, strict=True)) if sizes[0] != sizes[1]]
    return axes[0] if len(axes) == 1 and shape[axes[0]] * count == whole[axes[0]] else None


def _broadcast(tensor: torch.Tensor, root: int, group: Any) -> None:
    """Of any type: as bytes."""
    if tensor.numel():
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), group=group, group_src=root)
