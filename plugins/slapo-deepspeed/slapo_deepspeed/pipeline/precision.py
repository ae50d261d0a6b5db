"""After DeepSpeed has converted what a rank holds: what stands in for the rest of the model gets the same types.

Stages are found on the whole model, of which a rank holds its part; all ranks must find the same ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from slapo_core.spec.request import BuildRequest

__all__ = ["share_types"]

_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def share_types(request: BuildRequest, device: torch.device) -> None:
    """Give stand-ins the type that their tensors have where they are: a collective over the mesh.

    Args:
        request: of the build.
        device: that ranks send from.
    """
    import torch.distributed as dist

    mesh = request.schedule.mesh
    assert mesh is not None
    tensors = request.state.tensors()
    own = [
        _TYPES.index(live.tensor.dtype) + 1 if live.is_local and live.tensor.dtype in _TYPES else 0 for live in tensors
    ]
    types = torch.tensor(own, dtype=torch.uint8, device=device)
    dist.all_reduce(types, op=dist.ReduceOp.MAX, group=mesh.group("pp"))
    for live, number in zip(tensors, types.tolist(), strict=True):
        if not live.is_local and number and live.tensor.dtype != _TYPES[number - 1]:
            live.tensor.data = live.tensor.data.to(_TYPES[number - 1])
