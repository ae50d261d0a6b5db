"""Exchange messages between the ranks of a mesh, and decide together."""

from __future__ import annotations

import atexit
import contextlib
import math
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from slapo_core.errors import BuildError, RankFailedError, RankMismatchError
from slapo_runtime.private import default_store
from slapo_runtime.ranks.facts import RankFact, first_difference
from slapo_runtime.ranks.trial_groups import Attempt, TrialMesh, causes, chain_of, describe_failure, lost_rank

if TYPE_CHECKING:
    from slapo_core.layout import Mesh


T = TypeVar("T")

_CLOSED = "closed"
_ALL_CALL = (
    "call save, load, state_dict, save_pretrained, eval_step and verify on every rank, in the same order, not inside "
    "`if rank == 0:`"
)


@dataclass
class _Channel:
    """The store and process group through which the same ranks exchange messages.

    Args:
        beside: the default process group at the time.
        store: for this channel alone.
        group: over gloo.
        uses: the number of :class:`World` blocks that used it.
    """

    beside: Any
    store: Any
    group: Any
    uses: int = 0


_channels: dict[tuple[int, ...], _Channel] = {}

atexit.register(_channels.clear)  # before the interpreter's shutdown breaks their threads


_simulated: list[None] = []


@contextlib.contextmanager
def simulated_rank() -> Iterator[None]:
    """Simulate one rank of a mesh in this process, without other processes."""
    _simulated.append(None)
    try:
        yield
    finally:
        _simulated.pop()


class World:
    """The processes of a mesh, as a context manager for all of them.

    Messages go through a gloo group of their own: a rank that fails inside the model must not answer a collective of
    the others with one of ours, and a mesh may cover only some of the processes. The group is made once for the same
    ranks, and again after a block that ended with an exception.

    Args:
        mesh: the schedule's mesh; None, one rank, or an abstract mesh means alone.
        over: only the ranks along this mesh dimension, or along these, with this rank's other coordinates; None means
            all ranks of the mesh.

    Attributes:
        ranks: the global ranks, ascending, e.g. ``(2, 3)``; ``(0,)`` where alone.
        rank: this process's global rank.
    """

    def __init__(self, mesh: Mesh | None, *, over: str | Sequence[str] | None = None) -> None:
        dims = (over,) if isinstance(over, str) else over
        size = 1 if mesh is None else mesh.world_size if dims is None else math.prod(map(mesh.size, dims))
        self._mesh = mesh
        self._device_mesh = mesh.device_mesh if mesh is not None and size > 1 and not _simulated else None
        self._group: Any = None
        self._store: Any = None
        self._trial: TrialMesh | None = None
        self._attempts = 0
        self.ranks: tuple[int, ...] = (0,)
        if self._device_mesh is not None:
            self.ranks = tuple(sorted(self._device_mesh.mesh.flatten().tolist()))
            if dims is not None and mesh is not None:
                self.ranks = tuple(next(row for row in self._parts(*dims) if mesh.global_rank in row))
        self.rank = 0
        self._has_failed = False  # on some rank: all ranks end, without a further message

    def __enter__(self) -> World:
        if self._device_mesh is not None:
            import torch.distributed as dist

            self.rank = dist.get_rank()
            self._compare_calls(self._first_gather(_public_call()))
        return self

    def _compare_calls(self, by_rank: Sequence[str]) -> None:
        calls = dict(zip(self.ranks, by_rank, strict=True))
        if len(set(calls.values())) > 1:
            self._drop()
            raise RankMismatchError(
                "\n".join(["ranks are in different calls:", *(f"  rank {r}: {call}" for r, call in calls.items())]),
                hint=_ALL_CALL,
            )

    def gather_once(self, value: T) -> list[T]:
        """Enter, :meth:`gather` and leave, in one exchange."""
        if self._device_mesh is None:
            return [value]
        import torch.distributed as dist

        self.rank = dist.get_rank()
        found = self._first_gather((_public_call(), value))
        self._compare_calls([call for call, _ in found])
        self._group = None
        return [own for _, own in found]

    def all_come(self, seconds: float) -> bool:
        """Return whether every rank makes this call within some seconds; not a collective."""
        if self._device_mesh is None:
            return True
        import torch.distributed as dist

        own = dist.get_rank()
        store = dist.PrefixStore(f"slapo/meetings/{'-'.join(map(str, self.ranks))}", default_store())
        number = store.add(f"of rank {own}", 1)
        store.set(f"{number}/{own}", "")
        try:
            store.wait([f"{number}/{rank}" for rank in self.ranks], timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def gather_by_store(self, text: str) -> list[str]:
        """Gather a text of every rank through the store, in the order of ``ranks``; not a collective."""
        if self._device_mesh is None:
            return [text]
        import torch.distributed as dist

        own = dist.get_rank()
        store = dist.PrefixStore(f"slapo/texts/{'-'.join(map(str, self.ranks))}", default_store())
        number = store.add(f"of rank {own}", 1)
        store.set(f"{number}/{own}", text)
        return [store.get(f"{number}/{rank}").decode() for rank in self.ranks]

    def _first_gather(self, value: T) -> list[T]:
        """Gather by the existing channel, or by a new one."""
        import torch.distributed as dist
        from torch.distributed.constants import default_pg_timeout

        channel = _channels.get(self.ranks)
        if channel is not None and channel.beside is dist.group.WORLD and not channel.store.check([_CLOSED]):
            with contextlib.suppress(RuntimeError):  # another rank left a block by an exception, and dropped it
                return self._through(channel, self._exchanged, value)
        channel = None  # without references the group closes, which ends the wait of other ranks
        self._drop()
        store = _new_store(self.ranks, self.rank)
        timeout = max(store.timeout, default_pg_timeout)  # the user's timeout may be for single training steps
        group = dist.ProcessGroupGloo(store, self.ranks.index(self.rank), self.size, timeout)
        channel = _channels[self.ranks] = _Channel(dist.group.WORLD, store, group)
        # A full gather: no rank may close its connections while another one still opens them.
        return self._through(channel, self.gather, value)

    def _through(self, channel: _Channel, gather: Callable[[T], list[T]], value: T) -> list[T]:
        import torch.distributed as dist

        channel.uses += 1
        self._group, self._store = channel.group, dist.PrefixStore(f"use {channel.uses}", channel.store)
        return gather(value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._group is not None and error is not None:
            with contextlib.suppress(RuntimeError):  # the store ended with its rank
                self._store.set(f"left {self.rank}", f"{describe_failure(self.rank, error)}")
            self._drop()
        self._group = None

    def _drop(self) -> None:
        """Drop the channel, which ends the wait of other ranks."""
        self._group = None
        channel = _channels.pop(self.ranks, None)
        if channel is not None:
            with contextlib.suppress(RuntimeError):  # the process with the store ended
                channel.store.set(_CLOSED, "")  # forked processes, e.g. of a DataLoader, keep connections open

    @contextlib.contextmanager
    def trial_mesh(self, seconds: float | None) -> Iterator[Mesh | None]:
        """Give a mesh over trial process groups for :meth:`attempt`.

        Args:
            seconds: the timeout of collectives; None: see :class:`TrialMesh`.
        """
        if self.is_alone or self._mesh is None:
            yield self._mesh
            return
        import torch.distributed as dist

        self._trial = TrialMesh(self._mesh, dist.PrefixStore("trial", self._store), seconds)
        try:
            self.gather(None)  # no rank may fail and drop its groups while another one still connects
            yield self._trial
        finally:
            self._trial.drop()
            self._trial = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def gather(self, value: T) -> list[T]:
        """Gather every rank's value on every rank, in the order of ``ranks``.

        Raises:
            RankFailedError: a rank ended.
        """
        if self.is_alone:
            return [value]
        assert self._group is not None, "a World is used inside of its with block"
        with self._reporting_loss():
            return self._exchanged(value)

    @property
    def index(self) -> int:
        """The index of this rank in ``ranks``."""
        return 0 if self.is_alone else self.ranks.index(self.rank)

    def send(self, tensor: torch.Tensor, index: int) -> Callable[[], None]:
        """Begin to send a contiguous CPU tensor, and return a function that waits for the end.

        Args:
            tensor: of any type; it must not change before the end.
            index: of the receiving rank in ``ranks``.
        """
        held = [_as_bytes(tensor)]
        work = self._group.send(held, index, 0)

        def wait() -> None:
            with self._reporting_loss():
                work.wait()
            held.clear()

        return wait

    def receive(self, tensor: torch.Tensor, index: int) -> None:
        """Receive the values of a contiguous CPU tensor that the rank at ``index`` sends.

        Raises:
            RankFailedError: a rank ended.
        """
        with self._reporting_loss():
            self._group.recv([_as_bytes(tensor)], index, 0).wait()

    @contextlib.contextmanager
    def _reporting_loss(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise lost_rank(self._store, self.rank, self.ranks) from error

    def _exchanged(self, value: T) -> list[T]:
        message = bytearray(pickle.dumps(value))
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in self.ranks]  # whatever the default device
        self._group.allgather([sizes], [torch.tensor([len(message)], device="cpu")]).wait()
        length = max(int(size) for size in sizes)
        message.extend(bytes(length - len(message)))
        received = [bytearray(length) for _ in self.ranks]
        self._group.allgather([[_bytes(buffer) for buffer in received]], [_bytes(message)]).wait()
        return [pickle.loads(buffer) for buffer in received]  # pickle ignores the padding

    def attempt(self, function: Callable[[], T]) -> Attempt[T]:
        """Call ``function`` on every rank, and report failures (also ``sys.exit``) to all.

        Collectives of a :meth:`trial_mesh` wait for a rank that failed, or finished without them, until their timeout.
        """
        result: T | None = None
        error: BaseException | None = None
        trial = self._trial
        self._attempts += 1
        started = time.monotonic()
        try:
            with trial.watched(self._store_of_attempt()) if trial is not None else contextlib.nullcontext():
                result = function()
        except (Exception, SystemExit) as caught:  # noqa: BLE001 - reported to every rank; the caller handles it
            error = caught
        if trial is not None and error is not None:
            for each in chain_of(error):
                traceback.clear_frames(each.__traceback__)  # which hold the groups
            trial.drop()
        try:
            failures = self.gather(None if error is None else describe_failure(self.rank, error))
            if trial is not None and any(failures):
                trial.open()
                self.gather(None)
            elif trial is not None:
                trial.allow(time.monotonic() - started)
            found = causes(failures, self.ranks)
            return Attempt(result, error if any(cause.rank == self.rank for cause in found) else None, found)
        finally:
            del error  # its traceback references this frame: a trial's model would stay until garbage collection

    def _store_of_attempt(self) -> Any:
        import torch.distributed as dist

        return dist.PrefixStore(f"attempt {self._attempts}", self._store)

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Raise on every rank if the block raises on one of them.

        No collectives inside, except further blocks of this kind: a rank that fails between them ends the others, which
        wait in one.

        Args:
            what: the work of the block, for the message on the other ranks, e.g. ``"loading the weights"``.

        Raises:
            BuildError: on the other ranks, naming the rank that failed, and why.
        """
        error: Exception | None = None
        try:
            yield
        except RankFailedError:
            raise  # the other ranks know it, or wait elsewhere for the failed rank
        except Exception as caught:  # noqa: BLE001 - raised again below, after every rank knows it
            error = caught
        if self._has_failed:  # in an inner block, as on the other ranks: no further message follows
            if error is None and not self.is_alone:
                error = BuildError(f"{what} went on after a failure that ended the other ranks")
            if error is not None:
                raise error
            return
        failures = self.gather(None if error is None else describe_failure(self.rank, error))
        self._has_failed = any(failure is not None for failure in failures)
        if error is not None:
            raise error
        for failure in failures:
            if failure is not None:
                raise BuildError(f"{what} failed on rank {failure.rank}: {failure.kind}: {failure.text}")

    def agree(self, facts: Iterable[RankFact], *, hint: str) -> None:
        """Compare facts over all ranks; a single rank does not evaluate them.

        Args:
            facts: of this rank, by decreasing importance. Facts with ``over`` come after a fact about the mesh.
            hint: the corrected call.

        Raises:
            RankMismatchError: on every rank, with the first difference, the values and the ranks.
        """
        if self.is_alone:
            return
        attempt = self.attempt(lambda: list(facts))
        if attempt.error is not None:
            raise attempt.error
        for failure in attempt.failures:
            raise RankMismatchError(f"rank {failure.rank} cannot be compared with the others: {failure}")
        own = attempt.value()
        by_rank = dict(zip(self.ranks, self.gather(own), strict=True))
        scopes = {fact.over for theirs in by_rank.values() for fact in theirs}
        parts = {over: self._parts(over) if over is not None else [self.ranks] for over in scopes}
        message = first_difference(by_rank, parts)
        if message is not None:
            raise RankMismatchError(message, hint=hint)

    def _parts(self, *over: str) -> Sequence[Sequence[int]]:
        """Return groups of ranks along ``over``, with equal other coordinates."""
        assert self._mesh is not None
        return ranks_along(self._mesh, [mesh_dim for mesh_dim in over if mesh_dim in self._mesh.sizes])


@contextlib.contextmanager
def together(mesh: Mesh | None, what: str) -> Iterator[None]:
    """Run a block on all ranks together; see :meth:`World.together`."""
    with World(mesh) as world, world.together(what):
        yield


def gather_along(mesh: Mesh, mesh_dim: str, value: T) -> list[T]:
    """Gather values along a mesh dimension, from the ranks with this rank's other coordinates.

    A collective of the entire mesh.
    """
    with World(mesh) as world:
        values = dict(zip(world.ranks, world.gather(value), strict=True))
        row = next(ranks for ranks in ranks_along(mesh, (mesh_dim,)) if world.rank in ranks)
        return [values[rank] for rank in row]


def ranks_along(mesh: Mesh, over: Sequence[str], among: Iterable[tuple[str, tuple[int, ...]]] = ()) -> list[list[int]]:
    """Group the global ranks along mesh dimensions: ``[[0, 1], [2, 3]]``.

    Args:
        mesh: with processes.
        over: the mesh dimensions.
        among: coordinates along some of them, to which the groups are limited.
    """
    assert mesh.device_mesh is not None
    names = list(mesh.sizes)
    axes = [names.index(mesh_dim) for mesh_dim in over]
    grid = mesh.device_mesh.mesh
    for mesh_dim, places in among:
        grid = grid.index_select(names.index(mesh_dim), torch.tensor(places, device=grid.device))
    grid = grid.movedim(axes, list(range(-len(axes), 0)))
    length = 1
    for size in grid.shape[len(names) - len(axes) :]:
        length *= size
    return [sorted(row) for row in grid.reshape(-1, length).tolist()]


def _public_call() -> str:
    """Return the name of the user's call of slapo, e.g. ``"save"``."""
    frame: FrameType | None = sys._getframe(1)
    found = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("slapo_") and not module.startswith("slapo_runtime.rank_process"):
            found = frame.f_code.co_name
        frame = frame.f_back
    return found


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _bytes(buffer: bytearray) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _new_store(ranks: Sequence[int], rank: int) -> Any:
    """Open the store under a name that was never used before.

    Groups are connected by it, and not by ``torch.distributed.new_group``: for some of the processes, the latter's name
    depends on the number of groups of each, and returns with the next group, which then finds the addresses of the
    closed one.
    """
    import torch.distributed as dist

    store: Any = dist.PrefixStore(f"slapo/{'-'.join(map(str, ranks))}", default_store())
    count = store.add(f"opened by rank {rank}", 1)  # every rank opens the same stores, so all counts are equal
    for other in ranks:
        if store.add(f"opened by rank {other}", 0) > count:  # its next store, without this rank
            raise RankMismatchError(
                f"rank {other} made a call that rank {rank} did not make, before {_public_call()}()", hint=_ALL_CALL
            )
    return dist.PrefixStore(str(count), store)
