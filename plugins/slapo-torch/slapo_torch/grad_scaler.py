"""The scale of a float16 loss, with steps that all ranks skip together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slapo_runtime.correspondence.storage import is_distributed
from slapo_runtime.ranks.exchange import exchange_device
from slapo_torch.private import unscale

if TYPE_CHECKING:
    from slapo_core import Mesh


class MeshGradScaler(torch.amp.GradScaler):
    """A GradScaler over all ranks of a mesh: an infinite gradient on one of them skips the step on all.

    Args:
        device: of the model.
        mesh: of the schedule; None for one process.

    Attributes:
        found_inf: 1 if the present step has a gradient that is not finite, on any rank; None before its unscaling.
    """

    def __init__(self, device: torch.device, mesh: Mesh | None) -> None:
        super().__init__(device.type)
        self.found_inf: torch.Tensor | None = None
        self._home = device
        self._over: list[tuple[Any, torch.device]] = []
        for mesh_dim, size in mesh.sizes.items() if mesh is not None else ():
            if size > 1:
                assert mesh is not None
                self._over.append((mesh.group(mesh_dim), exchange_device(mesh)))

    def scaled_one(self) -> torch.Tensor:
        """Return the scale, on the device of the model, also on a rank without a loss."""
        return self.scale(torch.ones((), device=self._home))

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale local shards, and reduce what was found over the mesh: a collective."""
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            gradient = parameter.grad
            if gradient is None:
                continue
            if is_distributed(gradient):
                gradient = gradient.to_local()
            elif gradient.is_sparse:
                gradient = parameter.grad = gradient.coalesce()
                gradient = gradient.values()
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        found = found_inf.clone()
        with torch.no_grad():
            for (device, _), gradients in kinds.items():
                here = torch.zeros((), device=device)
                unscale(gradients, inv_scale.to(device), here)
                found = torch.maximum(found, here.to(found.device))
            for group, device in self._over:
                there = found.to(device)
                dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
                found = there.to(found.device)
        self.found_inf = found
        return {found.device: found}
