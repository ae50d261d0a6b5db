"""The ranks of a mesh: every decision is taken by all of them, or by none."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from slapo_core.errors import BuildError, RankMismatchError
from slapo_core.ranks.facts import RankFact, first_difference

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh

__all__ = ["Attempt", "Failure", "World", "together"]

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """An exception of some rank, as text that can travel; ``rank`` is the global one."""

    rank: int
    kind: str
    text: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """What came of a function that every rank called.

    Args:
        result: this rank's; None if it raised.
        error: what this rank raised.
        failures: what any rank raised, in the order of ranks; the same on every rank.
    """

    result: T | None
    error: Exception | None
    failures: tuple[Failure, ...]

    def value(self) -> T:
        """This rank's result, where no rank failed."""
        assert not self.failures
        return self.result  # type: ignore[return-value]


class World:
    """The processes of a mesh, or this one alone; a context manager that all of them enter, in the same order.

    Messages go through connections of their own, over gloo: a rank that fails inside the model must not answer the
    collective in which the others wait with one of ours, and a mesh may be a part of the processes only.

    Args:
        mesh: the schedule's mesh; None, one rank, or a mesh that is only declared means alone.
        over: only the ranks that differ from this one in nothing but their place along this mesh dimension; None
            means all ranks of the mesh.

    Attributes:
        ranks: the global ranks, ascending, e.g. ``(2, 3)``; ``(0,)`` where alone.
        rank: this process's global rank.
    """

    def __init__(self, mesh: Mesh | None, *, over: str | None = None) -> None:
        size = 1 if mesh is None else mesh.world_size if over is None else mesh.size(over)
        self._device_mesh = mesh.device_mesh if mesh is not None and size > 1 else None
        self._group: Any = None
        self.ranks: tuple[int, ...] = (0,)
        if self._device_mesh is not None:
            self.ranks = tuple(sorted(self._device_mesh.mesh.flatten().tolist()))
            if over is not None and mesh is not None:
                self.ranks = tuple(next(row for row in self._parts(over) if mesh.global_rank in row))
        self.rank = 0
        self._was_told = False  # of a failure on some rank: everybody ends, and nobody waits for another message

    def __enter__(self) -> World:
        if self._device_mesh is not None:
            import torch.distributed as dist

            self.rank = dist.get_rank()
            self._group = _connect(self.ranks, self.rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group = None

    @property
    def is_open(self) -> bool:
        """Whether the ``with`` block goes on."""
        return self.is_alone or self._group is not None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ``ranks``, on every rank."""
        if self.is_alone:
            return [value]
        assert self._group is not None, "a World is used inside of its with block"
        message = bytearray(pickle.dumps(value))
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in self.ranks]  # whatever the default device
        self._group.allgather([sizes], [torch.tensor([len(message)], device="cpu")]).wait()
        length = max(int(size) for size in sizes)
        message.extend(bytes(length - len(message)))
        received = [bytearray(length) for _ in self.ranks]
        self._group.allgather([[_bytes(buffer) for buffer in received]], [_bytes(message)]).wait()
        return [pickle.loads(buffer) for buffer in received]  # each ends where its pickle says, before the padding

    def attempt(self, function: Callable[[], T]) -> Attempt[T]:
        """Call ``function`` on every rank and tell every rank who failed."""
        result, error = None, None
        try:
            result = function()
        except Exception as caught:  # noqa: BLE001 - told to every rank; the caller decides what it means
            error = caught
        failure = None if error is None else _failure(self.rank, error)
        return Attempt(result, error, tuple(found for found in self.gather(failure) if found is not None))

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Let no rank go on alone: if the block raises on one rank, every rank raises.

        No collectives inside, but for further blocks of this kind: a rank that fails between them ends those that wait
        in one.

        Args:
            what: the work of the block, for the message on the other ranks, e.g. ``"loading the weights"``.

        Raises:
            BuildError: on the ranks where the block went well, naming the rank where it did not, and why.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 - raised again below, when every rank knows of it
            error = caught
        if self._was_told:  # inside of this block, and so the other ranks: nobody waits for another message
            if error is None and not self.is_alone:
                error = BuildError(f"{what} went on after a failure that ended the other ranks")
            if error is not None:
                raise error
            return
        failures = self.gather(None if error is None else _failure(self.rank, error))
        self._was_told = any(failure is not None for failure in failures)
        if error is not None:
            raise error
        for failure in failures:
            if failure is not None:
                raise BuildError(f"{what} failed on rank {failure.rank}: {failure.kind}: {failure.text}")

    def agree(self, facts: Iterable[RankFact], *, hint: str) -> None:
        """Compare facts over all ranks; where alone, they are not even asked for.

        Args:
            facts: every rank's own, in the order in which they matter. For facts with a scope the ranks must have
                agreed about the mesh, at the latest by an earlier fact of the same list.
            hint: the corrected call.

        Raises:
            RankMismatchError: on every rank; it names the first difference, the values and the ranks.
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
        message = first_difference(by_rank, {over: self._parts(over) for over in scopes})
        if message is not None:
            raise RankMismatchError(message, hint=hint)

    def _parts(self, over: str | None) -> Sequence[Sequence[int]]:
        """The ranks that differ in nothing but their place along ``over``; without it, all of them."""
        if over is None:
            return [self.ranks]
        assert self._device_mesh is not None
        names = self._device_mesh.mesh_dim_names or ()
        if over not in names:
            return [(rank,) for rank in self.ranks]
        grid = self._device_mesh.mesh.movedim(names.index(over), -1)
        return [sorted(row) for row in grid.reshape(-1, grid.shape[-1]).tolist()]


@contextlib.contextmanager
def together(mesh: Mesh | None, what: str) -> Iterator[None]:
    """As :meth:`World.together`, for a single block outside of any ``World``."""
    with World(mesh) as world, world.together(what):
        yield


def _bytes(buffer: bytearray) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _connect(ranks: Sequence[int], rank: int) -> Any:
    """Connections between these ranks, under a name that no others ever had.

    Not by ``torch.distributed.new_group``: for a part of the processes its name depends on how many groups each of
    them has, and comes back with the next group, which then finds the addresses of the one that is gone.
    """
    import torch.distributed as dist
    from torch.distributed.constants import default_pg_timeout
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = dist.PrefixStore(f"slapo/{'-'.join(map(str, ranks))}", _get_default_store())
    count = store.add(f"opened by rank {rank}", 1)  # every rank opens the same ones, so all count alike
    store = dist.PrefixStore(str(count), store)
    timeout = max(store.timeout, default_pg_timeout)  # the user's own may be made for single steps of training
    return dist.ProcessGroupGloo(store, list(ranks).index(rank), len(ranks), timeout)


def _failure(rank: int, error: Exception) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    inside = ("/slapo_core/verification/", "/slapo_core/ranks/world.py", "/torch/")
    theirs = [frame for frame in frames if not any(part in frame.filename.replace("\\", "/") for part in inside)]
    where = f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""
    return Failure(rank, type(error).__name__, str(error), where)
