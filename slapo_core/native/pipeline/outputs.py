"""Pieces of the model's output: which of them is the loss, and the whole output on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import BuildError
from slapo_core.spec.pipeline import Extent

if TYPE_CHECKING:
    from slapo_core.native.pipeline.stage import Work
    from slapo_core.spec.pipeline import Output, Partition, Value

__all__ = ["gather_output", "loss_pieces"]


def loss_pieces(output: Output) -> tuple[str, ...]:
    """The name of the piece that is the model's own loss; nothing where there is none."""
    names = output.assemble({name: name for name in output.pieces})
    if isinstance(names, str):
        return (names,)
    found = getattr(names, "loss", None)
    if found is None and isinstance(names, Mapping):
        found = names.get("loss")
    return (found,) if isinstance(found, str) else ()


def gather_output(
    partition: Partition,
    work: Work,
    ranks: Sequence[int],
    rank: int,
    group: Any,
    *,
    device: torch.device,
    count: int,
    samples: int,
) -> Any:
    """The output for the whole batch, on every rank: a collective over the stages.

    Args:
        partition: for a micro-batch.
        work: what the stages of this rank kept.
        ranks: which rank along ``pp`` runs each stage.
        rank: this one.
        group: of these ranks.
        device: where stages compute.
        count: of micro-batches.
        samples: in a micro-batch.

    Raises:
        BuildError: nobody knows which axis of a piece counts the samples.
    """
    pieces = {}
    for name in partition.output.pieces:
        value = partition.values[name]
        axis = _axis(value, samples, count)
        owner = ranks[value.producer]
        shape = [size * count if number == axis else size for number, size in enumerate(value.shape)]
        if rank == owner:
            parts = [work.outputs[name][number] for number in range(count)]
            whole = _together(parts, axis).contiguous()
        else:
            whole = torch.empty(shape, dtype=value.dtype, device=device)
        _broadcast(whole, owner, group)
        pieces[name] = whole
    return partition.output.assemble(pieces)


def _together(parts: list[torch.Tensor], axis: int | None) -> torch.Tensor:
    if axis is not None:
        return torch.cat(parts, axis)
    if parts[0].dim() == 0 and parts[0].is_floating_point():
        return torch.stack(parts).mean(0)  # a loss
    return parts[0]


def _axis(value: Value, samples: int, count: int) -> int | None:
    """The axis along which micro-batches are put together; None for what each of them has as a whole."""
    if not value.shape or count == 1:
        return None
    if value.symbolic_shape is not None:
        axes = [axis for axis, size in enumerate(value.symbolic_shape) if isinstance(size, Extent)]
        return axes[0] if axes else None
    axes = [axis for axis, size in enumerate(value.shape) if size == samples]
    if len(axes) == 1 or (axes and axes[0] == 0):
        return axes[0]
    raise BuildError(
        f"the piece '{value.name}' {value.shape} of the output has no axis that is known to count the "
        f"{samples} samples of a micro-batch, so the pieces of the micro-batches cannot be put together",
        hint="eval_step(batch) without gather_outputs",
    )


def _broadcast(tensor: torch.Tensor, root: int, group: Any) -> None:
    """Of any type: as bytes."""
    if not tensor.numel():
        return
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = root
    group.broadcast([tensor.reshape(-1).view(torch.uint8)], options).wait()
