"""What DeepSpeed receives into: the stages of this rank, and tensors of the sizes and types of what comes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from slapo_core.spec.stage_runner import ModelChunk, RankStages

if TYPE_CHECKING:
    import torch

    from slapo_core.spec.request import BuildRequest, StagedModel

__all__ = ["BufferedForm", "forms_with_buffers"]


class BufferedForm(RankStages):
    """A form with the tensors that DeepSpeed receives its messages in; the stages of a rank are neighbors."""

    @property
    def chunk(self) -> ModelChunk:
        """The stages of this rank."""
        (chunk,) = self.chunks
        return chunk

    def allocate(self) -> None:
        """Once, for all steps of this form."""
        coming, going = self.chunk.coming, self.chunk.going
        self.received = coming.empty(self.device) if coming is not None else ()
        sent = going.empty(self.device) if going is not None else ()
        self.gradients = [one for one in sent if one.is_floating_point()]


def forms_with_buffers(
    request: BuildRequest, device: torch.device, bare: Collection[int]
) -> Callable[[StagedModel, bool], BufferedForm]:
    """What makes them.

    Args:
        request: from ``build``.
        device: where stages compute.
        bare: the ranks along ``pp`` that train nothing.
    """
    mesh = request.schedule.mesh
    assert mesh is not None
    rank = mesh.rank("pp")

    def make(staged: StagedModel, training: bool) -> BufferedForm:
        form = BufferedForm(staged, request.stage_ranks, rank, device, training=training, bare=bare)
        form.allocate()
        return form

    return make
