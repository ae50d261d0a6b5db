"""The groups of our mesh, as DeepSpeed asks for them: the object that it calls an ``mpu``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh

__all__ = ["MeshUnit"]

_ALONE: list[Any] = []  # the group of this process alone, for all engines; torch keeps it for good


class MeshUnit:
    """``dp`` is DeepSpeed's data-parallel dimension, ``tp`` its model-parallel one.

    DeepSpeed keeps the last one that it was given for the whole process, and asks it wherever an engine has none. So
    every engine gets one, also without tensor parallelism, and also without a mesh.

    Args:
        mesh: of the schedule; None for one process that trains on its own.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh = mesh

    def forget(self) -> None:
        """Let DeepSpeed forget it, if it was the last one: an engine that a user makes by hand may have none."""
        from deepspeed.utils import groups

        if groups.mpu is self:
            groups.mpu = None

    # -- replicas ---------------------------------------------------------------------------------------------

    def get_data_parallel_group(self) -> Any:
        return self._group("dp")

    def get_data_parallel_world_size(self) -> int:
        return self._size("dp")

    def get_data_parallel_rank(self) -> int:
        return self._rank("dp")

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._group("dp"))

    # -- tensor parallelism: under its general name, and under that of newer code --------------------------------

    def get_model_parallel_group(self) -> Any:
        return self._group("tp")

    def get_model_parallel_world_size(self) -> int:
        return self._size("tp")

    def get_model_parallel_rank(self) -> int:
        return self._rank("tp")

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_tensor_model_parallel_src_rank(self) -> int:
        """The global rank of the first one in the group."""
        return dist.get_process_group_ranks(self._group("tp"))[0]

    # -- pipeline: there is none here -----------------------------------------------------------------------------

    def get_pipeline_model_parallel_group(self) -> Any:
        return self._group("pp")

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._size("pp")

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._rank("pp")

    def _size(self, mesh_dim: str) -> int:
        return self._mesh.size(mesh_dim) if self._mesh is not None else 1

    def _rank(self, mesh_dim: str) -> int:
        return self._mesh.rank(mesh_dim) if self._mesh is not None else 0

    def _group(self, mesh_dim: str) -> Any:
        """Of the mesh; where it has one rank there, the group of this process alone, which DeepSpeed needs."""
        group = self._mesh.group(mesh_dim) if self._mesh is not None else None
        return group if group is not None else _alone()


def _alone() -> Any:
    """A process group of this process: torch has no name for it, and None means all processes."""
    if dist.get_world_size() == 1:
        return dist.group.WORLD
    if not _ALONE or _ALONE[0][0] is not dist.group.WORLD:
        _ALONE[:] = [(dist.group.WORLD, dist.new_group([dist.get_rank()], use_local_synchronization=True))]
    return _ALONE[0][1]
