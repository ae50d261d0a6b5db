"""The order of a mesh in Megatron's terms: which dimension lies innermost, then the next, ``"tp-cp-ep-dp-pp"``.

Megatron makes all of its groups of one such order, twice: once for most parameters, where experts are replicas
(``dp`` x ``ep``), and once for those of experts, where context-parallel ranks are (``dp`` x ``cp``). Not every mesh can
be had so. Source: ``RankGenerator`` and ``initialize_model_parallel`` of ``megatron/core/parallel_state.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from slapo_core import BuildError, Violation
from slapo_core.spec.mesh import Mesh

__all__ = ["order_of", "row", "unfit"]


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
    names = _innermost_first(mesh)
    for inner in ("ep", "cp"):
        if inner in names and "dp" not in names:
            names.insert(names.index(inner) + 1, "dp")
    others = [name for name in ("tp", "cp", "ep", "dp") if name not in names]
    return "-".join([*others, *names, *([] if "pp" in names else ["pp"])])


def unfit(mesh: Mesh) -> Violation | None:
    """Why Megatron cannot make the groups of a mesh; None where it can.

    Args:
        mesh: of the schedule.
    """
    names = _innermost_first(mesh)
    if not _is_plain(mesh, names):
        return Violation(
            f"the DeviceMesh {mesh} has its ranks in an order of which Megatron cannot make groups: they must count up "
            "along its dimensions",
            hint="init_device_mesh(device_type, shape, mesh_dim_names=...)",
        )
    wanted = {name: mesh.size(name) for name in ("pp", "dp", "ep", "cp", "tp") if name in mesh}
    hint = f"mesh={wanted}"
    if {"cp", "ep"} <= set(names):
        return Violation(
            f"the mesh {mesh} has several ranks along both 'cp' and 'ep': Megatron counts each of them among the "
            "replicas of the other, and has no group of theirs that is the mesh's",
            hint="one rank along one of them",
        )
    if {"dp", "ep"} <= set(names) and abs(names.index("dp") - names.index("ep")) != 1:
        return Violation(
            f"the mesh {mesh} has another dimension between 'dp' and 'ep', which are one group of replicas for "
            "Megatron",
            hint=hint,
        )
    if {"cp", "ep"} & set(names) and "pp" in names and names[-1] != "pp":
        return Violation(
            f"the mesh {mesh} has 'pp' inside of another dimension, and several ranks along 'cp' or 'ep': Megatron "
            "wants 'pp' outermost then",
            hint=hint,
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
    return [_rank_at(mesh, {**here, **dict(zip(along, place, strict=True))}) for place in places]


def _rank_at(mesh: Mesh, place: dict[str, int]) -> int:
    if mesh.device_mesh is not None:
        return int(mesh.device_mesh.mesh[tuple(place[name] for name in mesh.sizes)])
    rank = 0
    for name, size in mesh.sizes.items():
        rank = rank * size + place[name]
    return rank


def _strides(mesh: Mesh) -> dict[str, int]:
    """For dimensions of several ranks: how many ranks further the next place is."""
    first = dict.fromkeys(mesh.sizes, 0)
    return {
        name: _rank_at(mesh, {**first, name: 1}) - _rank_at(mesh, first)
        for name, size in mesh.sizes.items()
        if size > 1
    }


def _innermost_first(mesh: Mesh) -> list[str]:
    strides = _strides(mesh)
    return sorted(strides, key=strides.__getitem__)


def _is_plain(mesh: Mesh, names: Sequence[str]) -> bool:
    """Whether ranks count up, along one dimension after the other."""
    strides, step = _strides(mesh), 1
    for name in names:
        if strides[name] != step:
            return False
        step *= mesh.size(name)
    every = itertools.product(*(range(size) for size in mesh.sizes.values()))
    return all(
        _rank_at(mesh, place) == sum(place[name] * strides[name] for name in names)
        for place in (dict(zip(mesh.sizes, one, strict=True)) for one in every)
    )
