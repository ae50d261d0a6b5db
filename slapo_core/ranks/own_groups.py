"""Process groups that belong to one engine, and a step that ends on every rank when it fails on one.

Stages wait for each other all the time. A rank that raises says why in the store and breaks the connections of these
groups, which ends the wait of its partners; they break theirs, and so on. The groups of the mesh are not touched: a
rank that waits in one of those goes on waiting until its partner leaves, or until the group's timeout.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import BuildError, RankFailedError
from slapo_core.ranks.connections import Connection, connections_since, mutual, open_sockets
from slapo_core.ranks.failures import describe_failure
from slapo_core.ranks.stand_ins import kinds_of, make_group
from slapo_core.ranks.world import World, _new_store

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh

__all__ = ["OwnGroups"]

_HEARING = 3.0  # seconds that a rank that failed leaves to the others to hear why, before it goes
_ANSWERING = 1.5  # seconds that those have to say so, when nobody says that he failed
_LOOK = 0.02


class OwnGroups:
    """Copies of a mesh's process groups; all ranks of the mesh make them together.

    Args:
        mesh: of several running ranks.
        mesh_dims: a group over each of these, where it has several ranks, and one of all ranks; one of them has.
        others: makes further groups, which break with these, and gives them; called on all ranks together.
    """

    def __init__(self, mesh: Mesh, mesh_dims: Sequence[str], others: Callable[[], Sequence[Any]] | None = None) -> None:
        with World(mesh) as world:
            self._ranks, self._rank = world.ranks, world.rank
            self._store = _new_store(self._ranks, self._rank)
            self._groups: dict[str, Any] = {}
            self._members: dict[str, Sequence[int]] = {}
            before = open_sockets()
            first = next(mesh.group(mesh_dim) for mesh_dim in mesh_dims if mesh.size(mesh_dim) > 1)
            with world.together("connecting the ranks of the pipeline"):
                for mesh_dim in mesh_dims:
                    if mesh.size(mesh_dim) > 1:
                        self._copy(mesh_dim, mesh.group(mesh_dim))
                self._copy("", first, self._ranks)
                self._others = list(others()) if others is not None else []
                own = connections_since(before)
            told = world.gather([connection.ends for connection in own])
            self._connections: list[Connection] = mutual(own, (ends for theirs in told for ends in theirs))
        self._blocks: dict[str, int] = {}  # by mesh_dim, along which ranks count alike
        self._agreed: Exception | None = None  # what every rank knows of already
        self.is_broken = False

    def _copy(self, mesh_dim: str, original: Any, members: Sequence[int] = ()) -> None:
        """A group of the same backend; of the same ranks, or others."""
        import torch.distributed as dist

        members = members or dist.get_process_group_ranks(original)
        kinds = kinds_of(original)
        if not kinds:
            raise RankFailedError("a process group of the mesh has a backend that is neither gloo nor nccl")
        store = dist.PrefixStore(f"over '{mesh_dim}' {'-'.join(map(str, members))}", self._store)
        place = members.index(self._rank)
        self._members[mesh_dim] = members
        self._groups[mesh_dim] = make_group(original.group_name, kinds, place, members, store, _timeout(original))

    def group(self, mesh_dim: str = "") -> Any:
        """The copy over that dimension; "" over all ranks; None where it has one rank."""
        return self._groups.get(mesh_dim)

    @contextlib.contextmanager
    def step(self, what: Callable[[], str]) -> Iterator[None]:
        """Around the work of a step on this rank.

        Args:
            what: what this rank does just now, e.g. ``"stage 1 in the forward of micro-batch 0"``.

        Raises:
            RankFailedError: on every rank, naming the one that failed, what it did, and its exception, which is chained
                there.
        """
        try:
            yield
        except BaseException as error:
            if error is self._agreed:
                raise
            ended = self._end(error, what())
            if not isinstance(error, Exception):
                raise  # KeyboardInterrupt, SystemExit: the others are told, and here it stays what it is
            raise ended from error

    @contextlib.contextmanager
    def together(self, what: str, device: torch.device, *, mesh_dim: str = "") -> Iterator[None]:
        """Inside of :meth:`step`, around what goes wrong before ranks wait for each other: a step may follow.

        Args:
            what: the work of the block, e.g. ``"cutting the batch"``.
            device: that the groups send from.
            mesh_dim: over which ranks agree; "" all of them.

        Raises:
            BuildError: on the ranks where the block went well, naming one where it did not, and why.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 - raised again below, when every rank knows of it
            error = caught
        self._blocks[mesh_dim] = self._blocks.get(mesh_dim, 0) + 1
        members = self._members[mesh_dim]
        key = f"block {self._blocks[mesh_dim]} over '{mesh_dim}' on"
        if error is not None:
            self._store.set(f"{key} {self._rank}", str(describe_failure(self._rank, error)))
        failed = torch.full((1,), float(error is not None), device=device)
        self._groups[mesh_dim].allreduce([failed]).wait()
        if error is None and failed.item():
            there = [rank for rank in members if self._store.check([f"{key} {rank}"])]
            told = "; ".join(f"rank {rank}: {self._store.get(f'{key} {rank}').decode()}" for rank in there)
            error = BuildError(f"{what} failed on {told or 'another rank'}")
        if error is not None:
            self._agreed = error
            raise error

    def _end(self, error: BaseException, what: str) -> RankFailedError:
        """Tell the others, or hear from them; afterwards the groups are gone."""
        failure = describe_failure(self._rank, error)
        own = f"{what}: {failure}"
        try:
            if not failure.lost:
                self._store.set(f"failed {self._rank}", own)
            self.break_off()
            self._store.set(f"heard {self._rank}", "")
            causes = self._heard() if failure.lost else {self._rank: own}
            if not failure.lost:
                self._wait(lambda: all(self._has_heard(rank) for rank in self._ranks), _HEARING)
        except RuntimeError as gone:  # the process that keeps the store has left
            causes = {self._ranks[0]: f"it has left, and the store with it ({gone})"}
            self.break_off()
        if not causes:
            text = f"a step ended on rank {self._rank} ({what}): {failure}; no rank says why"
            return RankFailedError(text, failures={self._rank: str(failure)})
        told = "; ".join(f"rank {rank}, {text}" for rank, text in causes.items())
        return RankFailedError(f"a step failed on {told}", failures=causes, first=min(causes))

    def _heard(self) -> dict[int, str]:
        """What the ranks say that failed; or who says nothing at all."""

        def failed() -> list[int]:
            return [rank for rank in self._ranks if self._store.check([f"failed {rank}"])]

        self._wait(lambda: bool(failed()) or all(self._has_heard(rank) for rank in self._ranks), _ANSWERING)
        told = {rank: self._store.get(f"failed {rank}").decode() for rank in failed()}
        silent = [rank for rank in self._ranks if not self._has_heard(rank)]
        return told or dict.fromkeys(silent, "no sign of life: the process ended, or hangs")

    def _has_heard(self, rank: int) -> bool:
        return bool(self._store.check([f"heard {rank}"]))

    def _wait(self, is_enough: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_enough() and time.monotonic() < deadline:
            time.sleep(_LOOK)

    def break_off(self) -> None:
        """Let every rank that waits for this one, or will, raise instead."""
        self.is_broken = True
        for group in (*self._groups.values(), *self._others):
            group.abort()  # NCCL
        for connection in self._connections:
            connection.end()  # gloo
        self.close()

    def close(self) -> None:
        """Let go of the groups."""
        self._connections = []
        self._groups = {}
        self._others = []


def _timeout(group: Any) -> timedelta:
    """Of the group's collectives."""
    from torch.distributed.constants import default_pg_timeout

    found = [
        getattr(getattr(group._get_backend(device), "options", None), "_timeout", default_pg_timeout)
        for device in group._device_types
    ]
    return max(found, default=default_pg_timeout)
