"""Megatron's process groups: made in the order of the mesh, or those of the user's script, compared rank by rank.

Megatron has one set of them for the process. Groups made here stay for the next engine of the same mesh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slapo_core import BuildError, Violation
from slapo_core.layout import Mesh, start_single_process_group
from slapo_megatron.private import groups_of_megatron, is_alive, timeout_minutes
from slapo_megatron.runtime import MEGATRON

if TYPE_CHECKING:
    import torch

_DIMS = ("tp", "dp", "pp")


def _ranks(mesh: Mesh) -> torch.Tensor:
    """The global ranks, an axis for each dimension of the mesh."""
    import torch

    if mesh.device_mesh is not None:
        return mesh.device_mesh.mesh
    return torch.arange(mesh.world_size).reshape(tuple(mesh.sizes.values()))


def _strides(mesh: Mesh) -> dict[str, int]:
    """The distance of neighboring ranks along each dimension; 0 for one rank."""
    ranks = _ranks(mesh)
    axes = [ranks.movedim(number, 0).reshape(size, -1)[:2, 0].tolist() for number, size in enumerate(ranks.shape)]
    return {name: axis[-1] - axis[0] for name, axis in zip(mesh.sizes, axes, strict=True)}


def order_of(mesh: Mesh) -> str:
    """Return Megatron's order of dimensions for a mesh, e.g. ``"tp-dp-pp"``: innermost first.

    Args:
        mesh: of the schedule.
    """
    strides = _strides(mesh)
    return "-".join(sorted(_DIMS, key=lambda name: strides.get(name, 0)))


def unfit(mesh: Mesh) -> Violation | None:
    """Why Megatron cannot make the groups of a mesh; None where it can.

    Args:
        mesh: of the schedule.
    """
    strides = _strides(mesh)
    outermost_first = sorted(range(len(strides)), key=lambda number: -list(strides.values())[number])
    if _ranks(mesh).permute(outermost_first).flatten().tolist() == list(range(mesh.world_size)):
        return None
    return Violation(
        f"the DeviceMesh {mesh} has its ranks in an order of which Megatron cannot make groups: they must count up "
        "along its dimensions",
        hint="init_device_mesh(device_type, shape, mesh_dim_names=...)",
    )


def row(mesh: Mesh, mesh_dim: str) -> list[int]:
    """The global ranks that differ from this one in nothing but their place along a dimension.

    Args:
        mesh: of the schedule.
        mesh_dim: this rank alone where the mesh does not have it.
    """
    place = tuple(slice(None) if name == mesh_dim else mesh.rank(name) for name in mesh.sizes)
    return sorted(_ranks(mesh)[place].reshape(-1).tolist())


def differences(mesh: Mesh, instances: int = 1) -> Iterator[str]:
    """Which groups of Megatron's have other ranks than the mesh says, as far as this rank is in them.

    Args:
        mesh: of the schedule.
        instances: of the distributed optimizer.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    groups = {
        "tp": ("tensor model parallel", parallel_state.get_tensor_model_parallel_group()),
        "pp": ("pipeline model parallel", parallel_state.get_pipeline_model_parallel_group()),
        "dp": ("data parallel", parallel_state.get_data_parallel_group(with_context_parallel=True)),
    }
    for mesh_dim, (name, group) in groups.items():
        there, wanted = dist.get_process_group_ranks(group), row(mesh, mesh_dim)
        if there != wanted:
            dim = f"'{mesh_dim}'" if mesh_dim in mesh else "one rank"
            yield f"{name} ranks {there}, by the mesh ({dim}) {wanted}"
    part = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    if part.size() * instances != mesh.size("dp"):
        yield f"{part.size()} replicas in each instance of the distributed optimizer, of which there are {instances}"


@dataclass(eq=False)
class Lease:
    """Hold Megatron's process groups for an engine, until it is closed.

    Args:
        groups: every group of Megatron's that this rank is in.
        is_ours: whether they were made here, not by the user's script.
    """

    groups: list[Any] = field(repr=False)
    is_ours: bool

    def close(self) -> None:
        """Let go of the groups; twice is as once."""
        if self in _open:
            _open.remove(self)
        self.groups = []


_ours: list[Any] = []  # the groups that were made here
_open: list[Lease] = []


def start(
    mesh: Mesh | None, *, device_type: str | None = None, virtual: int | None = None, instances: int = 1
) -> Lease:
    """Let Megatron have process groups over the ranks of the mesh: a collective over all of them.

    Groups that the user's script has made are taken if they are those of the mesh, rank by rank. Those that were made
    here are reused for the same mesh, and made again for another one where no engine is open.

    Where torch has no process group, this process is alone: it gets a group of one, which stays until it ends.

    Args:
        mesh: of the schedule; None for one process alone.
        device_type: of the model, which decides the backend of a process alone; None: that of the mesh, or the CPU.
        virtual: stages on each rank along ``pp``, where there are several.
        instances: of the distributed optimizer.

    Raises:
        BuildError: Megatron-core is not installed, the groups of the user's script are others, or an open engine uses
            groups of another mesh.
    """
    MEGATRON.require()
    import torch.distributed as dist
    from megatron.core import parallel_state

    if not dist.is_initialized():
        start_single_process_group(device_type or "cpu")
    mesh = Mesh({}) if mesh is None else mesh
    if mesh.world_size != dist.get_world_size():
        raise BuildError(
            f"the mesh {mesh} has {mesh.world_size} ranks, and torch.distributed runs {dist.get_world_size()} "
            "processes, over which all of Megatron's groups lie",
            hint="a mesh of all of them",
        )
    there = groups_of_megatron()
    is_ours = bool(there) and len(there) == len(_ours) and all(map(lambda one, other: one is other, there, _ours))
    is_stale = not all(map(is_alive, there))
    if is_stale and not is_ours:
        raise BuildError(
            "Megatron's process groups are of a torch.distributed that was ended since",
            hint="megatron.core.parallel_state.destroy_model_parallel() before destroy_process_group()",
        )
    if is_ours and (is_stale or any(differences(mesh, instances))):
        if _open and not is_stale:
            raise BuildError(
                f"an open engine uses Megatron's process groups of another mesh, and this one is for {mesh}: Megatron "
                "has one set of them in a process",
                hint="engine.close() of the other one first",
            )
        _destroy()
    if not parallel_state.model_parallel_is_initialized():
        _make(mesh, instances)
        is_ours = True
    _compare(mesh, virtual, instances)
    lease = Lease(groups_of_megatron(), is_ours)
    _open.append(lease)
    return lease


@contextlib.contextmanager
def given_back() -> Iterator[None]:
    """Close the lease if making the engine fails."""
    before = list(_open)
    try:
        yield
    except BaseException:
        for lease in [one for one in _open if one not in before]:
            lease.close()
        raise


def _compare(mesh: Mesh, virtual: int | None, instances: int) -> None:
    """Refuse groups of the user's script that are not those of the mesh."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    found = list(differences(mesh, instances))
    if found:
        sizes = {"tensor_model_parallel_size": mesh.size("tp"), "pipeline_model_parallel_size": mesh.size("pp")}
        sizes["num_distributed_optimizer_instances"] = instances
        arguments = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        call = ", ".join([*arguments, f'order="{order_of(mesh)}"'])
        raise BuildError(
            f"Megatron's process groups, which were made before, are not those of the mesh {mesh}: on rank "
            f"{dist.get_rank()}, {'; '.join(found)}",
            hint=f"parallel_state.initialize_model_parallel({call}), or leave it to build",
        )
    there = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if there is not None and there != virtual:
        raise BuildError(
            f"Megatron's parallel state, which was made before, has {there} virtual stages, and the schedule makes "
            f"{virtual or 1} for each rank along 'pp'",
            hint=f"parallel_state.initialize_model_parallel(virtual_pipeline_model_parallel_size={virtual}, ...), or "
            "leave it to build",
        )


def _make(mesh: Mesh, instances: int) -> None:
    from megatron.core import parallel_state

    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=mesh.size("tp"),
            pipeline_model_parallel_size=mesh.size("pp"),
            num_distributed_optimizer_instances=instances,
            distributed_timeout_minutes=timeout_minutes(),
            order=order_of(mesh),
        )
    except BaseException:
        _destroy()
        raise
    _ours[:] = groups_of_megatron()


def _destroy() -> None:
    """Destroy Megatron's groups, in the same order on every rank, and its state with them."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    groups = groups_of_megatron()
    parallel_state.destroy_model_parallel()
    for group in groups:
        if is_alive(group):
            dist.destroy_process_group(group)
    _ours.clear()
