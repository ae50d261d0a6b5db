"""Send tensors between some of the ranks along a mesh dimension, over its process group.

All processes would have to make a group for each set of ranks, but a mesh may cover only some of them; sends need no
further group. Sums are bitwise equal on all ranks, because each adds in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from slapo_core.layout import device_of

if TYPE_CHECKING:
    from slapo_core.layout import Mesh


def exchange_device(mesh: Mesh) -> torch.device:
    """Return the device from which the mesh's groups send tensors."""
    return device_of(mesh.device_mesh.device_type if mesh.device_mesh is not None else "cpu")


def spread(tensor: torch.Tensor, mesh: Mesh, mesh_dim: str, places: Sequence[int]) -> None:
    """Broadcast ``tensor`` from the first of some ranks to the others, in place.

    Args:
        tensor: contiguous, and of one shape and type on all of them.
        mesh: with processes.
        mesh_dim: the mesh dimension of the ranks.
        places: their coordinates along it, ascending, with this rank's.
    """
    import torch.distributed as dist

    group, own = mesh.group(mesh_dim), mesh.rank(mesh_dim)
    if own == places[0]:
        for place in places[1:]:
            dist.send(tensor, group=group, group_dst=place)
    else:
        dist.recv(tensor, group=group, group_src=places[0])


def collect(tensor: torch.Tensor, mesh: Mesh, mesh_dim: str, places: Sequence[int]) -> list[torch.Tensor]:
    """All-gather tensors among some ranks, in their order; arguments as for :func:`spread`."""
    import torch.distributed as dist

    group, own = mesh.group(mesh_dim), mesh.rank(mesh_dim)
    found, operations = [], []
    for place in places:
        if place == own:
            found.append(tensor)
            continue
        found.append(torch.empty_like(tensor))
        operations.append(dist.P2POp(dist.irecv, found[-1], group=group, group_peer=place))
        operations.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=place))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return found


def sum_among(tensor: torch.Tensor, mesh: Mesh, mesh_dim: str, places: Sequence[int]) -> torch.Tensor:
    """Return the sum of some ranks' tensors, as new memory; arguments as for :func:`spread`."""
    first, *others = collect(tensor, mesh, mesh_dim, places)
    total = first.clone()
    for other in others:
        total += other
    return total
