"""The private names of ``torch.distributed`` that are used here."""

from __future__ import annotations

from datetime import timedelta
from typing import Any


def default_store() -> Any:
    """The store that the processes were started with."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def new_group_among(original: Any, store: Any, name: str, timeout: timedelta) -> Any:
    """A group of the ranks and backend of another one, which its members alone make.

    ``torch.distributed.new_group`` is called by all processes; or it names the group by how many each of them has, and
    a name comes back with the next group, which then finds the addresses of the one that is gone.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    ranks = dist.get_process_group_ranks(original)
    group, _ = distributed_c10d._new_process_group_helper(  # type: ignore[attr-defined]
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        distributed_c10d._world.pg_map[original][0],
        store,
        name,  # type: ignore[arg-type]
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Give the collectives of a group another timeout."""
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timeout, group)  # type: ignore[attr-defined]
