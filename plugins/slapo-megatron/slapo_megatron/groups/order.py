"""Express the mesh in Megatron's order of dimensions, and compare Megatron's groups with the mesh."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from slapo_core import BuildError, Violation
from slapo_core.layout import Mesh

_INNERMOST_FIRST = ("tp", "cp", "ep", "dp", "pp")
"""Megatron's own default."""


def order_of(mesh: Mesh) -> str:
    """Megatron's order string.

    Args:
        mesh: of the schedule.

    Raises:
        BuildError: Megatron cannot make the groups of this mesh.
    """
    reason = unfit(mesh)
    if reason is not None:
        raise BuildError(reason.message, hint=reason.hint)
    wanted = _strides(mesh)
    orders = itertools.permutations(_INNERMOST_FIRST)
    return "-".join(next(order for order in orders if wanted.items() <= _steps(order, mesh.sizes).items()))


def unfit(mesh: Mesh) -> Violation | None:
    """Why Megatron cannot make the groups of a mesh; None where it can.

    Args:
        mesh: of the schedule.
    """
    if not _is_plain(mesh):
        return Violation(
            f"the DeviceMesh {mesh} has its ranks in an order of which Megatron cannot make groups: they must count up "
            "along its dimensions",
            hint="init_device_mesh(device_type, shape, mesh_dim_names=...)",
        )
    return None


def row(mesh: Mesh, mesh_dims: Sequence[str]) -> list[int]:
    """The global ranks that differ from this one in nothing but their places along these dimensions, in their order.

    Args:
        mesh: of the schedule.
        mesh_dims: those that it does not have are left out.
    """
    along = [name for name in mesh.sizes if name in mesh_dims]
    here = {name: mesh.rank(name) for name in mesh.sizes}
    places = itertools.product(*(range(mesh.size(name)) for name in along))
    return sorted(_rank_at(mesh, {**here, **dict(zip(along, place, strict=True))}) for place in places)


def _steps(order: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the distance in ranks along each dimension."""
    found, step = {}, 1
    for name in order:
        found[name] = step
        step *= sizes.get(name, 1)
    return found


def _strides(mesh: Mesh) -> dict[str, int]:
    """The same of the mesh, for dimensions of several ranks."""
    first = dict.fromkeys(mesh.sizes, 0)
    return {
        name: _rank_at(mesh, {**first, name: 1}) - _rank_at(mesh, first)
        for name, size in mesh.sizes.items()
        if size > 1
    }


def _rank_at(mesh: Mesh, place: Mapping[str, int]) -> int:
    if mesh.device_mesh is not None:
        return int(mesh.device_mesh.mesh[tuple(place[name] for name in mesh.sizes)])
    rank = 0
    for name, size in mesh.sizes.items():
        rank = rank * size + place[name]
    return rank


def _is_plain(mesh: Mesh) -> bool:
    """Whether ranks count up, along one dimension after the other."""
    strides, step = _strides(mesh), 1
    for name in sorted(strides, key=strides.__getitem__):
        if strides[name] != step:
            return False
        step *= mesh.size(name)
    every = itertools.product(*(range(size) for size in mesh.sizes.values()))
    return all(
        _rank_at(mesh, place) == sum(place[name] * strides[name] for name in strides)
        for place in (dict(zip(mesh.sizes, one, strict=True)) for one in every)
    )


def compare(mesh: Mesh) -> None:
    """
    Args:
        mesh: of the schedule.

    Raises:
        BuildError: a group that this rank is in has other ranks; it names both.
    """
    found = list(differences(mesh))
    if found:
        sizes = {
            "tensor_model_parallel_size": mesh.size("tp"),
            "pipeline_model_parallel_size": mesh.size("pp"),
        }
        arguments = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        call = ", ".join([*arguments, f'order="{order_of(mesh)}"'])
        raise BuildError(
            f"Megatron's process groups, which were made before, are not those of the mesh {mesh}: on rank "
            f"{dist.get_rank()}, {'; '.join(found)}",
            hint=f"parallel_state.initialize_model_parallel({call}), or leave it to build",
        )


def differences(mesh: Mesh) -> Iterator[str]:
    """Which groups of Megatron's have other ranks than the mesh says, as far as this rank is in them.

    Args:
        mesh: of the schedule.
    """
    from megatron.core import parallel_state

    groups: dict[str, tuple[Any, tuple[str, ...]]] = {
        "tensor model parallel": (parallel_state.get_tensor_model_parallel_group(), ("tp",)),
        "pipeline model parallel": (parallel_state.get_pipeline_model_parallel_group(), ("pp",)),
        "data parallel": (parallel_state.get_data_parallel_group(with_context_parallel=True), ("dp",)),
        "context parallel": (parallel_state.get_context_parallel_group(), ("cp",)),
        "expert parallel": (parallel_state.get_expert_model_parallel_group(), ("ep",)),
    }
    for name, (group, mesh_dims) in groups.items():
        there, wanted = dist.get_process_group_ranks(group), row(mesh, mesh_dims)
        if there != wanted:
            dims = " and ".join(f"'{one}'" for one in mesh_dims if one in mesh) or "one rank"
            yield f"{name} ranks {there}, by the mesh ({dims}) {wanted}"


def compare_virtual(virtual: int | None) -> None:
    """
    Args:
        virtual: stages on each rank along ``pp``, where there are several.

    Raises:
        BuildError: the user's script has said another number.
    """
    from megatron.core import parallel_state

    there = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if there is not None and there != virtual:
        raise BuildError(
            f"Megatron's parallel state, which was made before, has {there} virtual stages, and the schedule makes "
            f"{virtual or 1} for each rank along 'pp'",
            hint=f"parallel_state.initialize_model_parallel(virtual_pipeline_model_parallel_size={virtual}, ...), or "
            "leave it to build",
        )
