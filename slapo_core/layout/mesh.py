"""Meshes: named dimensions of ranks, declared by sizes or by torch's ``DeviceMesh``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from slapo_core.errors import MeshError
from slapo_core.layout.devices import type_of_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

MESH_DIMS = ("dp_replicate", "dp", "pp", "cp", "ep", "tp")
"""Names a mesh dimension may have: data, pipeline, context, expert and tensor parallelism."""

DATA_DIMS = ("dp_replicate", "dp", "cp", "ep")
"""Dimensions along which ranks take other samples: running statistics and dropout are each rank's own."""


class Mesh:
    """Named dimensions, their sizes, and this process's place in each.

    Args:
        sizes: mesh_dim -> number of ranks, outermost dimension first, e.g. ``{"dp": 2, "tp": 4}``.
        rank: the global rank whose place this is, row-major over ``sizes``.
        device_mesh: torch's mesh; None for a trivial mesh (one rank) and for an abstract one.
    """

    def __init__(self, sizes: Mapping[str, int], *, rank: int = 0, device_mesh: DeviceMesh | None = None) -> None:
        self._sizes = dict(sizes)
        self._device_mesh = device_mesh
        self._rank = rank
        self._coordinate: dict[str, int] = {}
        remainder = rank
        for mesh_dim, size in reversed(self._sizes.items()):
            remainder, self._coordinate[mesh_dim] = divmod(remainder, size)
        if device_mesh is not None:
            self._coordinate = {mesh_dim: device_mesh.get_local_rank(mesh_dim) for mesh_dim in self._sizes}

    @property
    def sizes(self) -> dict[str, int]:
        """mesh_dim -> number of ranks, e.g. ``{"dp": 2, "tp": 4}``."""
        return dict(self._sizes)

    @property
    def world_size(self) -> int:
        """Number of processes the mesh needs, e.g. 8."""
        return math.prod(self._sizes.values())

    @property
    def global_rank(self) -> int:
        """This process's place among all, from 0."""
        return self._rank

    @property
    def is_first_rank(self) -> bool:
        """Whether this process is the first one in every dimension."""
        return not any(self._coordinate.values())

    @property
    def is_abstract(self) -> bool:
        """Whether the mesh is declared without processes: several ranks, none running."""
        return self._device_mesh is None and self.world_size > 1

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """Torch's mesh; None for a mesh of one rank and for an abstract one."""
        return self._device_mesh

    def __contains__(self, mesh_dim: object) -> bool:
        return mesh_dim in self._sizes

    def size(self, mesh_dim: str) -> int:
        """Number of ranks along ``mesh_dim``; 1 for a dimension that the mesh does not have."""
        return self._sizes.get(mesh_dim, 1)

    def rank(self, mesh_dim: str) -> int:
        """This process's place along ``mesh_dim``, from 0."""
        return self._coordinate.get(mesh_dim, 0)

    def group(self, mesh_dim: str) -> ProcessGroup | None:
        """The process group along ``mesh_dim``; None where the dimension has one rank.

        Raises:
            MeshError: the mesh is abstract: there are no process groups.
        """
        if self.size(mesh_dim) == 1:
            return None
        if self._device_mesh is None:
            raise MeshError(
                f"the mesh {self} is abstract: this process has no process group for mesh_dim '{mesh_dim}'",
                hint=self.launch_hint(),
            )
        return self._device_mesh.get_group(mesh_dim)

    def launch_hint(self) -> str:
        """Return the launch command for an abstract mesh; where torchrun ran, the missing call."""
        import torch.distributed as dist

        if dist.is_available() and (dist.is_initialized() or os.environ.get("WORLD_SIZE", "1") != "1"):
            return "call torch.distributed.init_process_group() before create_schedule(): torchrun started this process"
        return self.launch_command()

    def launch_command(self) -> str:
        """Return the launch command for the mesh, with at most 8 processes a node."""
        nodes, rest = divmod(self.world_size, 8)
        if nodes < 2 or rest:
            return f"torchrun --nproc-per-node {self.world_size} your_script.py"
        return f"torchrun --nnodes {nodes} --nproc-per-node 8 your_script.py"

    def __str__(self) -> str:
        return "{" + ", ".join(f"{mesh_dim!r}: {size}" for mesh_dim, size in self._sizes.items()) + "}"

    def __repr__(self) -> str:
        return f"Mesh({self}{', abstract' if self.is_abstract else ''}, rank={self._rank})"

    def __deepcopy__(self, memo: object) -> Mesh:
        return self  # process groups are handles of the process, not values


def declare_mesh(mesh: Mesh | DeviceMesh | Mapping[str, int] | None, *, rank: int = 0) -> Mesh | None:
    """Make a ``Mesh`` of the argument of ``create_schedule(mesh=...)``.

    Args:
        mesh: None, ``{"dp": 2, "tp": 2}`` (outermost first), or torch's ``DeviceMesh`` with named dimensions; names of
            its own, e.g. ``"model"``, are used by steps that say so (``mesh_dim="model"``), and refused by ``build``.
            A dictionary makes torch's mesh at once where torch.distributed is initialized; otherwise the mesh is
            abstract, unless it has one rank.
        rank: for an abstract mesh, this process's global rank.

    Raises:
        MeshError: an unknown dimension, a size that is not a positive integer, another world size, or a rank
            outside of the mesh.
    """
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(mesh, DeviceMesh):
        return _adopt(mesh)
    if not isinstance(mesh, Mapping):
        raise MeshError(
            f"mesh must be a dictionary of sizes or a DeviceMesh (got {mesh!r})",
            hint='create_schedule(model, mesh={"tp": 2})',
        )
    check_sizes(mesh)
    return _realize(dict(mesh), rank)


def _adopt(device_mesh: DeviceMesh) -> Mesh:
    names = device_mesh.mesh_dim_names
    if names is None:
        raise MeshError(
            "the DeviceMesh has no dimension names",
            hint='init_device_mesh(device_type, shape, mesh_dim_names=("dp", "tp"))',
        )
    sizes = {name: device_mesh.size(position) for position, name in enumerate(names)}
    return Mesh(sizes, rank=device_mesh.get_rank(), device_mesh=device_mesh)


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Refuse unknown dimensions, and sizes that are not positive integers.

    Raises:
        MeshError: the first one.
    """
    for mesh_dim, size in sizes.items():
        if mesh_dim not in MESH_DIMS:
            raise MeshError(
                f"unknown mesh dimension {mesh_dim!r}; the known ones are {', '.join(MESH_DIMS)}",
                hint='create_schedule(model, mesh={"dp": 1, "tp": 2})',
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise MeshError(
                f"the size of mesh dimension '{mesh_dim}' must be a positive integer (got {size!r})",
                hint=f'create_schedule(model, mesh={{"{mesh_dim}": 2}})',
            )


def _realize(sizes: dict[str, int], rank: int) -> Mesh:
    import torch.distributed as dist

    world_size = math.prod(sizes.values())
    if not (dist.is_available() and dist.is_initialized()):
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise MeshError(
                f"rank must be an integer (got {rank!r})", hint=f"create_schedule(model, mesh={Mesh(sizes)}, rank=0)"
            )
        if not 0 <= rank < world_size:
            raise MeshError(
                f"rank {rank} is outside of the mesh {Mesh(sizes)}, which has ranks 0 to {world_size - 1}",
                hint=f"create_schedule(model, mesh={Mesh(sizes)}, rank=0)",
            )
        return Mesh(sizes, rank=rank)
    if world_size != dist.get_world_size():
        raise MeshError(
            f"the mesh {Mesh(sizes)} needs {world_size} processes, but torch.distributed runs {dist.get_world_size()}",
            hint=f"launch with `{Mesh(sizes).launch_command()}`, or declare sizes whose product is "
            f"{dist.get_world_size()}",
        )
    if world_size == 1:
        return Mesh(sizes)
    from torch.distributed.device_mesh import init_device_mesh

    device_mesh = init_device_mesh(type_of_ranks(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return Mesh(sizes, rank=dist.get_rank(), device_mesh=device_mesh)
