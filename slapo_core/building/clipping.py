"""The norm of all gradients over all ranks, and clipping to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh
    from slapo_core.weights.correspondence import Correspondence

__all__ = ["GradientClipper"]


class GradientClipper:
    """Scale gradients down so that their L2 norm over all ranks is at most ``max_norm``.

    Pieces of a sharded parameter are counted on every rank of the mesh dimensions that split it; replicas once.
    """

    def __init__(self, correspondence: Correspondence, max_norm: float) -> None:
        self._mesh: Mesh | None = correspondence.mesh
        self._max_norm = max_norm
        by_dims: dict[tuple[str, ...], list[nn.Parameter]] = {(): []}
        for mesh_dim, _ in sorted(set(correspondence.tree.tensors.kept_on.values())):
            by_dims.setdefault(self._running(mesh_dim), [])  # the owner's gradients; the other ranks have none
        for live in correspondence.live():
            if isinstance(live.tensor, nn.Parameter):
                dims = {mesh_dim for mesh_dim, _ in live.layout.shards()}
                dims.update(mesh_dim for mesh_dim, _ in correspondence.owners(live))
                by_dims.setdefault(self._running(*dims), []).append(live.tensor)
        self._by_dims = by_dims

    def _running(self, *mesh_dims: str) -> tuple[str, ...]:
        return tuple(dim for dim in sorted(mesh_dims) if self._mesh is not None and self._mesh.size(dim) > 1)

    def clip(self) -> torch.Tensor:
        """Clip in place.

        Returns:
            the norm before, a scalar tensor, the same on every rank.
        """
        norms = []
        for dims, parameters in self._by_dims.items():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            norm = nn.utils.get_total_norm(gradients)
            if dims and self._mesh is not None:
                device = parameters[0].device if parameters else norm.device
                square = norm.to(device).square()  # a rank without gradients takes part too
                for mesh_dim in dims:
                    dist.all_reduce(square, group=self._mesh.group(mesh_dim))
                norm = square.sqrt()
            norms.append(norm)
        device = next((norm.device for norm in norms if norm.device.type != "cpu"), norms[0].device)
        total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
        everything = [parameter for parameters in self._by_dims.values() for parameter in parameters]
        nn.utils.clip_grads_with_norm_(everything, self._max_norm, total)
        return total
