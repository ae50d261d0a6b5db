"""Which ranks of a mesh need the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["kinds_of_ranks"]


def kinds_of_ranks(schedule: Schedule, mesh: Mapping[str, int] | None) -> tuple[tuple[int, ...], ...]:
    """The ranks, those that are alike together, the kind of rank 0 first.

    Layouts divide evenly, so that ranks along ``tp`` and ``dp`` hold alike pieces. Other are the stages of ``pp``, and
    a rank that keeps a tensor alone.
    """
    sizes = dict(mesh or {})
    marks: dict[str, list[object]] = {
        mesh_dim: list(range(size)) if mesh_dim == "pp" else [None] * size for mesh_dim, size in sizes.items()
    }
    for name, (mesh_dim, rank) in schedule.tree.tensors.kept_on.items():
        if mesh_dim in marks:
            marks[mesh_dim][rank] = (marks[mesh_dim][rank], name)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*(range(size) for size in sizes.values()))):
        mark = tuple(marks[mesh_dim][at] for mesh_dim, at in zip(sizes, place, strict=True))
        kinds.setdefault(mark, []).append(rank)
    return tuple(tuple(ranks) for ranks in kinds.values())
