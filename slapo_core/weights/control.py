"""The control group of a mesh: connections over which its ranks check each other, made once and kept.

Saving, loading and building compare many small things over all ranks. They share one gloo group, apart from the groups
of the model, whose collectives a rank that fails inside of the model must not answer with one of these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slapo_core.errors import RankFailedError, RankMismatchError
from slapo_core.ranks.world import _ALL_CALL, World, _public_call

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh

_CLOSED = "closed"


@dataclass
class _Control:
    world: World
    depth: int = 0  # of the blocks that use it now


@contextlib.contextmanager
def control(mesh: Mesh | None) -> Iterator[World]:
    """Enter the control group of a mesh: a collective; all of its ranks do, in the same order.

    An error that leaves the outermost block closes the group, which ends the wait of the other ranks; the next use
    connects them anew.

    Args:
        mesh: of the schedule; None, one rank, or an abstract mesh means this process alone.

    Raises:
        RankMismatchError: ranks are in different calls.
        RankFailedError: a rank is gone.
    """
    if mesh is None or mesh.device_mesh is None:
        yield World(None)
        return
    held: _Control | None = mesh.control
    if held is None or not held.depth:
        held = mesh.control = _entered(mesh, held)
    held.depth += 1
    try:
        yield held.world
    except BaseException as error:
        if held.depth == 1:
            _close(mesh, held, error)
        raise
    finally:
        held.depth -= 1


@contextlib.contextmanager
def together(mesh: Mesh | None, what: str) -> Iterator[None]:
    """As :meth:`World.together`, for one block."""
    with control(mesh) as world, world.together(what):
        yield


def _entered(mesh: Mesh, held: _Control | None) -> _Control:
    """The group, once all ranks are in the same call; connected anew where a rank closed it after an error."""
    if held is not None and not held.world._store.check([_CLOSED]):
        with contextlib.suppress(RankFailedError):
            calls = dict(zip(held.world.ranks, held.world.gather(_public_call()), strict=True))
            if len(set(calls.values())) == 1:
                return held
            told = ["ranks are in different calls:", *(f"  rank {rank}: {call}" for rank, call in calls.items())]
            mismatch = RankMismatchError("\n".join(told), hint=_ALL_CALL)
            _close(mesh, held, mismatch)
            raise mismatch
    if held is not None:
        _close(mesh, held, RankFailedError("another rank closed the group"))
    return _Control(World(mesh).__enter__())  # which compares the calls, too


def _close(mesh: Mesh, held: _Control, error: BaseException) -> None:
    mesh.control = None
    with contextlib.suppress(RuntimeError):  # the process that keeps the store is gone
        held.world._store.set(_CLOSED, "")  # forked processes, such as a DataLoader's, keep the connections open
    held.world.__exit__(type(error), error, error.__traceback__)
