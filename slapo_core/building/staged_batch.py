"""A batch cut into micro-batches, with the stages that run each of them: what every runtime of stages begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from slapo_core.errors import BuildError

if TYPE_CHECKING:
    from slapo_core.spec.pipeline import Output
    from slapo_core.spec.request import BuildRequest, StagedModel

__all__ = ["StagedBatch", "staged_pieces"]


@dataclass(frozen=True)
class StagedBatch:
    """Documented in spec/request.py.

    Args:
        staged: the stages of each micro-batch.
        pieces: the micro-batches as the batch is given.
        inputs: of each, the arguments of the model's forward by parameter.
        request: finds the loss.
    """

    staged: StagedModel
    pieces: Sequence[Any]
    inputs: Sequence[Mapping[str, Any]]
    request: BuildRequest

    def loss(self, number: int, pieces: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.request.loss_of(self.staged.partition.output.assemble(pieces), self.pieces[number])


def staged_pieces(
    request: BuildRequest,
    pieces: Sequence[Any],
    *,
    training: bool,
    axes: Mapping[str, int | None] | None,
    prepare: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
) -> StagedBatch:
    """As :meth:`slapo_core.spec.request.BuildRequest.staged` says, of micro-batches."""
    inputs: list[Mapping[str, Any]] = [request.inputs_of(piece) for piece in pieces]
    if prepare is not None:
        inputs = [prepare(dict(one)) for one in inputs]
    pick = _loss if request.loss is None else None  # one object, by which stages are looked up
    staged = request.stages(inputs[0], training=training, outputs=pick, batch_axes=axes)
    built_with = len(request.stage_ranks)
    if staged is None or len(staged.partition.stages) != built_with:
        found = 1 if staged is None else len(staged.partition.stages)
        raise BuildError(
            f"the model was built with {built_with} stages, and has {found} for this batch",
            hint="give batches of the form of example_inputs",
        )
    if pick is not None and not pick(staged.partition.output):
        request.loss_of(staged.partition.output.assemble({}), None)  # says that there is none
    return StagedBatch(staged, pieces, [tree_map_only(torch.Tensor, _apart, one) for one in inputs], request)


def _loss(output: Output) -> tuple[str, ...]:
    return (output.loss,) if output.loss is not None else ()


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A micro-batch's tensor with a count of writes of its own: as a view it would share that of the whole batch."""
    return tensor if tensor.requires_grad else tensor.data
