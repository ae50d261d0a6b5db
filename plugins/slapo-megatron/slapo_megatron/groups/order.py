"""The order of a mesh in Megatron's terms: which dimension lies innermost, then the next, ``"tp-cp-ep-dp-pp"``.

Source: ``RankGenerator`` and ``initialize_model_parallel`` of ``megatron/core/parallel_state.py``. The mesh has one
rank along ``cp`` and ``ep``, which may stand anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from slapo_core import BuildError, Violation
from slapo_core.spec.mesh import Mesh

__all__ = ["order_of", "row", "unfit"]

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
    """How many ranks further the next place along each dimension is."""
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
