"""Megatron's process groups: made in the order of the mesh, or the script's own, compared rank by rank.

Megatron has one set of groups in a process. Groups made here stay for the next engine of the same mesh.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

from slapo_core import BuildError
from slapo_core.layout import Mesh, start_single_process_group
from slapo_megatron.private import groups_of_megatron, is_alive, timeout_minutes
from slapo_megatron.runtime import MEGATRON

_DIMS = ("tp", "dp", "pp")


def order_of(mesh: Mesh) -> str:
    """Return Megatron's order of dimensions for a mesh, e.g. ``"tp-dp-pp"``: innermost first.

    Args:
        mesh: of the schedule.
    """
    own = [name for name in reversed(mesh.sizes) if name in _DIMS]
    return "-".join([*(name for name in _DIMS if name not in own), *own])


def differences(mesh: Mesh, instances: int = 1) -> Iterator[str]:
    """Yield Megatron's groups of this rank whose ranks differ from the mesh.

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
        own = mesh.group(mesh_dim)
        there, wanted = dist.get_process_group_ranks(group), [dist.get_rank()]
        if own is not None:
            wanted = dist.get_process_group_ranks(own)
        if there != wanted:
            dim = f"'{mesh_dim}'" if mesh_dim in mesh else "one rank"
            yield f"{name} ranks {there}, by the mesh ({dim}) {wanted}"
    part = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    if part.size() * instances != mesh.size("dp"):
        yield f"{part.size()} replicas in each instance of the distributed optimizer, of which there are {instances}"


_ours: list[Any] = []  # the groups that were made here
_users: list[object] = []  # one for each open engine


def acquire_groups() -> Callable[[], None]:
    """Keep Megatron's process groups for an engine, until it calls the returned function."""
    user = object()
    _users.append(user)

    def release() -> None:
        if user in _users:
            _users.remove(user)

    return release


def start(mesh: Mesh | None, *, device_type: str | None = None, instances: int = 1) -> None:
    """Make or check Megatron's process groups over the ranks of the mesh: a collective over all ranks.

    Groups of the user's script must have the ranks of the mesh. Groups made here are reused for the same mesh, and
    made again for another one if no engine is open.

    Without a process group of torch this process is alone: it gets a group of one, which stays until the process ends.

    Args:
        mesh: of the schedule; None for a single process.
        device_type: of the model, for the backend of a single process; None: the CPU.
        instances: of the distributed optimizer.

    Raises:
        BuildError: Megatron-core is not installed, the script's groups have other ranks, or an open engine uses groups
            of another mesh.
    """
    MEGATRON.require()
    import torch.distributed as dist
    from megatron.core import parallel_state

    if not dist.is_initialized():
        start_single_process_group(device_type or "cpu")
    mesh = Mesh({}) if mesh is None else mesh
    if mesh.world_size != dist.get_world_size():
        raise BuildError(
            f"the schedule's mesh {mesh} has {mesh.world_size} ranks, but torch.distributed has "
            f"{dist.get_world_size()} processes, all of which Megatron's groups cover",
            hint=f'create_schedule(model, mesh={{"dp": {dist.get_world_size()}}})',
        )
    there = groups_of_megatron()
    is_ours = bool(there) and len(there) == len(_ours) and all(map(operator.is_, there, _ours))
    is_stale = not all(map(is_alive, there))
    if is_ours and (is_stale or any(differences(mesh, instances))):
        if _users and not is_stale:
            raise BuildError(
                f"an open engine uses Megatron's process groups of another mesh than {mesh}: Megatron has one set of "
                "groups in a process",
                hint="first close() the other engine",
            )
        _destroy()
    if not parallel_state.model_parallel_is_initialized():
        _make(mesh, instances)
    _compare(mesh, instances)


def _compare(mesh: Mesh, instances: int) -> None:
    """Refuse groups of the user's script whose ranks differ from the mesh."""
    import torch.distributed as dist

    found = list(differences(mesh, instances))
    if found:
        sizes = {"tensor_model_parallel_size": mesh.size("tp"), "pipeline_model_parallel_size": mesh.size("pp")}
        sizes["num_distributed_optimizer_instances"] = instances
        arguments = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        call = ", ".join([*arguments, f'order="{order_of(mesh)}"'])
        raise BuildError(
            f"Megatron's process groups, made before the build, do not match the mesh {mesh}: on rank "
            f"{dist.get_rank()}, {'; '.join(found)}",
            hint=f"parallel_state.initialize_model_parallel({call}), or leave it to build",
        )


def _make(mesh: Mesh, instances: int) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.size("tp"),
        pipeline_model_parallel_size=mesh.size("pp"),
        num_distributed_optimizer_instances=instances,
        distributed_timeout_minutes=timeout_minutes(),
        order=order_of(mesh),
    )
    _ours[:] = groups_of_megatron()


def _destroy() -> None:
    """Destroy Megatron's groups and parallel state, in the same order on every rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    groups = groups_of_megatron()
    parallel_state.destroy_model_parallel()
    for group in groups:
        if is_alive(group):
            dist.destroy_process_group(group)
    _ours.clear()
