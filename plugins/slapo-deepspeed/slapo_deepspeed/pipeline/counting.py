"""Which parameters count for the norm of all gradients, over all stages.

ZeRO-1 counts what its rank is the first one of along ``tp`` for, and pieces that are marked. Without ZeRO, DeepSpeed
counts the first rank of all, and elsewhere what is marked: later stages would be left out, and nothing tells. A
parameter that several stages hold counts once.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from slapo_deepspeed.marks import PIECE

if TYPE_CHECKING:
    from slapo_core.spec.request import BuildRequest

__all__ = ["count_once"]


def count_once(request: BuildRequest, copies: Collection[torch.Tensor]) -> None:
    """Mark what this rank counts, after ``marks.mark``, and after ``PipelineModule`` has marked everything as counted.

    Args:
        request: of the build; every tensor is in its place.
        copies: parameters of this rank that an earlier one along ``pp`` holds too.
    """
    mesh = request.schedule.mesh
    assert mesh is not None
    is_copy = {id(one) for one in copies}
    for live in request.state.tensors():
        if not live.is_local or not live.is_parameter:
            continue
        if id(live.tensor) in is_copy:
            live.tensor.ds_pipe_replicated = True  # type: ignore[attr-defined]
            for name in PIECE:
                setattr(live.tensor, name, False)
        elif mesh.rank("pp") and not mesh.rank("tp"):
            setattr(live.tensor, PIECE[0], True)
