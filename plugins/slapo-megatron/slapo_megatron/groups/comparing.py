"""Are Megatron's process groups those of the mesh? Rank by rank: sizes alone would let other ranks share a model.

Imports Megatron: import it in functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from slapo_core import BuildError
from slapo_core.spec.mesh import Mesh
from slapo_megatron.groups.order import order_of, row

__all__ = ["compare", "compare_virtual", "differences"]


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
    there = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if there is not None and there != virtual:
        raise BuildError(
            f"Megatron's parallel state, which was made before, has {there} virtual stages, and the schedule makes "
            f"{virtual or 1} for each rank along 'pp'",
            hint=f"parallel_state.initialize_model_parallel(virtual_pipeline_model_parallel_size={virtual}, ...), or "
            "leave it to build",
        )
