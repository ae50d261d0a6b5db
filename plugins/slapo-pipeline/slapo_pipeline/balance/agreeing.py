"""One answer on all ranks of a mesh, where each would find another one."""

from __future__ import annotations

from collections.abc import Callable

from slapo_core import Mesh, TraceError

__all__ = ["first_ranks"]


def first_ranks(mesh: Mesh | None, find: Callable[[], tuple[int, ...]], count: int) -> tuple[int, ...]:
    """What ``find`` gives on the first rank, on every rank; the others do not call it, and wait.

    Args:
        mesh: of the schedule.
        find: gives ``count`` integers; it must not communicate.
        count: how many.

    Raises:
        TraceError: on the other ranks, if ``find`` raised on the first one; there its own error is raised.
    """
    if mesh is None or mesh.device_mesh is None:
        return find()
    import torch
    import torch.distributed as dist

    found: tuple[int, ...] = ()
    error: Exception | None = None
    if mesh.is_first_rank:
        try:
            found = find()
        except Exception as caught:  # noqa: BLE001 - raised again when the others know of it
            error = caught
    message = torch.zeros(1 + count, dtype=torch.int64)
    if found:
        message = torch.tensor([1, *found])
    message = message.to(mesh.device_mesh.device_type)
    for mesh_dim, size in mesh.sizes.items():
        if size > 1:  # after the last dimension every rank has what the first one along all of them sent
            dist.broadcast(message, group=mesh.group(mesh_dim), group_src=0)
    if error is not None:
        raise error
    done, *cuts = message.tolist()
    if not done:
        raise TraceError(
            'balance="time" is measured on the first rank of the mesh, and failed there', hint="see that rank's error"
        )
    return tuple(cuts)
