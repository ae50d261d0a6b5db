"""Megatron's process groups, with the sizes and the order of the mesh."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING

from slapo_core import BuildError
from slapo_megatron.installed import require_megatron

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh

__all__ = ["start"]


def start(mesh: Mesh | None) -> None:
    """Let Megatron have process groups over the ranks of the mesh, or join those that it has.

    Where no process group is there, this process is alone: it gets a group of one, which stays until it ends.

    Args:
        mesh: of the schedule; None for one process alone.

    Raises:
        BuildError: Megatron-core is not installed, or has groups of other ranks already.
    """
    require_megatron()
    import torch.distributed as dist
    from megatron.core import parallel_state

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(_end_alone)
    sizes = {name: mesh.size(name) if mesh is not None else 1 for name in ("tp", "pp", "dp")}
    if parallel_state.model_parallel_is_initialized():
        there = {
            "tp": parallel_state.get_tensor_model_parallel_world_size(),
            "pp": parallel_state.get_pipeline_model_parallel_world_size(),
            "dp": parallel_state.get_data_parallel_world_size(),
        }
        if there != sizes:
            raise BuildError(f"Megatron's groups have sizes {there}, and the mesh {sizes}")
        return
    order = "-".join(reversed(list(mesh.sizes))) if mesh is not None and mesh.sizes else "tp-dp-pp"
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes["tp"], pipeline_model_parallel_size=sizes["pp"], order=order
    )


def _end_alone() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
