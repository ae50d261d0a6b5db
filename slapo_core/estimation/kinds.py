"""Which ranks of a mesh need the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

__all__ = ["kinds_of_ranks"]


def kinds_of_ranks(mesh: Mapping[str, int] | None) -> tuple[tuple[int, ...], ...]:
    """The ranks, those that are alike together, the kind of rank 0 first.

    Layouts divide evenly, so that ranks along ``tp`` and ``dp`` hold shards of the same sizes; stages of ``pp`` differ.
    """
    sizes = dict(mesh or {})
    kinds: dict[int, list[int]] = {}
    for rank, place in enumerate(itertools.product(*(range(size) for size in sizes.values()))):
        kinds.setdefault(dict(zip(sizes, place, strict=True)).get("pp", 0), []).append(rank)
    return tuple(tuple(ranks) for ranks in kinds.values())
