"""Exchange messages and facts between the ranks of a mesh, and take decisions on all of them together."""

from __future__ import annotations

import atexit
import contextlib
import math
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from slapo_core.errors import BuildError, RankFailedError, RankMismatchError
from slapo_runtime.private import default_store
from slapo_runtime.trial_groups import Attempt, TrialMesh, causes, chain_of, describe_failure, lost_rank

if TYPE_CHECKING:
    from slapo_core.layout import Mesh


_CHUNK = 1 << 20  # elements; so that no temporary is larger than some megabytes
_WORD = 8  # bytes that are taken as one integer
_SPREAD = (-7046029254386353131, -4658895280553007687)  # odd 64-bit numbers with well mixed bits
_MODULUS = 1 << 64


def checksum(tensor: torch.Tensor) -> int:
    """Compute a 64-bit checksum of a tensor's bits, in order (not cryptographic).

    Neither the type nor the shape counts, only the elements in row-major order, wherever they lie in memory. It is
    computed on the tensor's device, block by block, and is the same number on every kind of device.

    Args:
        tensor: of any type; of a sparse one the indices and the values count, of a nested or quantized one its parts,
            of one on the meta device the size.
    """
    total = 0
    for dense in _dense_parts(tensor.detach()):
        total = (total * 1_000_003 + dense.numel() * dense.element_size()) % _MODULUS
        if dense.is_meta:
            continue
        position = 1
        for words in _words(dense):
            total = (total + _mixed(words, position)) % _MODULUS
            position += words.numel()
    return total


def _mixed(words: torch.Tensor, position: int) -> int:
    """The sum over all words, each stirred together with its position; all arithmetic is modulo 2**64."""
    mixed = torch.arange(position, position + words.numel(), dtype=torch.int64, device=words.device)
    mixed.mul_(_SPREAD[0]).add_(words)
    mixed.bitwise_xor_(mixed >> 32).mul_(_SPREAD[1])
    mixed.bitwise_xor_(mixed >> 29)
    return int(mixed.sum())


def _dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if (parts := parts_of(tensor)) is not None:
        for part in parts:
            yield from _dense_parts(part)
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        yield from (tensor.indices(), tensor.values())
    else:
        yield tensor if tensor.layout is torch.strided or tensor.is_meta else tensor.to_dense()


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the tensors that a nested or quantized tensor consists of; None for a plain one, or a DTensor."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if not hasattr(type(tensor), "__tensor_flatten__") or hasattr(tensor, "device_mesh"):
        return None
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Give the bytes of all elements as 64-bit integers; the last one is padded with zeros."""
    rest = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    for block in _blocks(tensor):
        own = torch.empty(block.numel(), dtype=block.dtype, device=block.device)
        own.view(block.shape).copy_(block)  # resolves strides, conjugation and negation
        joined = torch.cat([rest, own.view(torch.uint8)])
        whole = joined.numel() // _WORD * _WORD
        yield joined[:whole].view(torch.int64)
        rest = joined[whole:]
    if rest.numel():
        yield torch.cat([rest, rest.new_zeros(_WORD - rest.numel())]).view(torch.int64)


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in row-major order, cut so that a copy of a block is small."""
    if tensor.numel() <= _CHUNK:
        if tensor.numel():
            yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(_CHUNK)
    else:
        rows = _CHUNK // (tensor.numel() // tensor.shape[0])
        for part in tensor.split(max(rows, 1)):
            yield from _blocks(part if rows else part[0])


_NOTHING = "(nothing)"


@dataclass(frozen=True)
class RankFact:
    """A value that must be the same on every rank.

    Args:
        what: of the message "ranks disagree about ...", e.g. ``"the seed given to build"``; once in a list of facts.
        value: for people and for comparing, e.g. ``"0"``; None if this rank cannot tell, and is not compared.
        over: compared only among ranks that differ in nothing but their place along this mesh dimension, e.g.
            ``"tp"``; None compares all.
    """

    what: str
    value: str | None
    over: str | None = None


def describe_tensor(tensor: torch.Tensor) -> str:
    """Shape, type and checksum: ``"(8, 6), torch.float32, checksum 9ae16a3b2f90404f"``."""
    values = "without values" if tensor.is_meta else f"checksum {checksum(tensor):016x}"
    shape = [tuple(part.shape) for part in tensor.unbind()] if tensor.is_nested else tuple(tensor.shape)
    return f"{shape}, {tensor.dtype}, {values}"


def first_difference(
    by_rank: Mapping[int, Sequence[RankFact]], parts: Mapping[str | None, Iterable[Sequence[int]]]
) -> str | None:
    """The first fact that ranks disagree about, with the values of all ranks; None if there is none.

    Args:
        by_rank: global rank -> its facts. The list of some rank may be longer: a step that another rank lacks is
            named before what comes after it.
        parts: for every ``over`` in the facts, the ranks that are compared with each other.

    Returns:
        the message: ``"ranks disagree about the seed given to build:\\n  rank 0: 0\\n  ranks 1, 2: 1"``.
    """
    longest_first = sorted(by_rank.values(), key=len, reverse=True)
    scopes = {fact.what: fact.over for facts in reversed(longest_first) for fact in facts}
    values = {rank: {fact.what: fact.value for fact in facts} for rank, facts in by_rank.items()}
    for what in dict.fromkeys(fact.what for facts in longest_first for fact in facts):
        for ranks in parts[scopes[what]]:
            ranks_by_value: dict[str, list[int]] = {}
            for rank in ranks:
                value = values[rank].get(what, _NOTHING)
                if value is not None:
                    ranks_by_value.setdefault(value, []).append(rank)
            if len(ranks_by_value) > 1:
                lines = [f"  {_ranks(those)}: {value}" for value, those in ranks_by_value.items()]
                return "\n".join([f"ranks disagree about {what}:", *lines])
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


T = TypeVar("T")

_CLOSED = "closed"
_ALL_CALL = (
    "every rank calls save, load, state_dict, save_pretrained, eval_step and verify, in the same order: not inside of "
    "`if rank == 0:`"
)


@dataclass
class _Channel:
    """The store and process group through which the same ranks exchange messages.

    Args:
        beside: the default process group at the time.
        store: in which no other code writes.
        group: over gloo.
        uses: by how many a :class:`World` was entered with it.
    """

    beside: Any
    store: Any
    group: Any
    uses: int = 0


_channels: dict[tuple[int, ...], _Channel] = {}

atexit.register(_channels.clear)  # before the interpreter takes apart what their threads need


_simulated: list[None] = []


@contextlib.contextmanager
def simulated_rank() -> Iterator[None]:
    """Simulate one rank of a mesh in this process: there are no other processes to compare with."""
    _simulated.append(None)
    try:
        yield
    finally:
        _simulated.pop()


class World:
    """The processes of a mesh; a context manager that all of them enter, in the same order.

    Messages go through a group of their own, over gloo: a rank that fails inside the model must not answer the
    collective in which the others wait with one of ours, and a mesh may be a part of the processes only. It is made
    once for the same ranks, and again after a block that ended with an exception.

    Args:
        mesh: the schedule's mesh; None, one rank, or an abstract mesh means alone.
        over: only the ranks that differ from this one in nothing but their place along this mesh dimension, or along
            these; None means all ranks of the mesh.

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
        self._was_told = False  # of a failure on some rank: all ranks end, and no further message follows

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
        """Enter, :meth:`gather` and leave, by one exchange."""
        if self._device_mesh is None:
            return [value]
        import torch.distributed as dist

        self.rank = dist.get_rank()
        found = self._first_gather((_public_call(), value))
        self._compare_calls([call for call, _ in found])
        self._group = None
        return [own for _, own in found]

    def all_come(self, seconds: float) -> bool:
        """Tell whether every rank makes this call within some seconds; not a collective: none waits for ever."""
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

    def _first_gather(self, value: T) -> list[T]:
        """Through the channel that was there, if it is whole on every rank."""
        import torch.distributed as dist
        from torch.distributed.constants import default_pg_timeout

        channel = _channels.get(self.ranks)
        if channel is not None and channel.beside is dist.group.WORLD and not channel.store.check([_CLOSED]):
            with contextlib.suppress(RuntimeError):  # another rank has left a block, and dropped it
                return self._through(channel, self._exchanged, value)
        channel = None  # no reference stays: this ends the wait of ranks that have not heard of it
        self._drop()
        store = _new_store(self.ranks, self.rank)
        timeout = max(store.timeout, default_pg_timeout)  # the user's own may be made for single steps of training
        group = dist.ProcessGroupGloo(store, self.ranks.index(self.rank), self.size, timeout)
        channel = _channels[self.ranks] = _Channel(dist.group.WORLD, store, group)
        # No rank leaves, and closes its connections, while another one still makes them.
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
            with contextlib.suppress(RuntimeError):  # it ended with its rank
                self._store.set(f"left {self.rank}", f"{describe_failure(self.rank, error)}")
            self._drop()
        self._group = None

    def _drop(self) -> None:
        """Drop the channel: ranks waiting for this one raise, and the next use connects again."""
        self._group = None
        channel = _channels.pop(self.ranks, None)
        if channel is not None:
            with contextlib.suppress(RuntimeError):  # the process that keeps the store is gone
                channel.store.set(_CLOSED, "")  # forked processes, such as a DataLoader's, keep connections open

    @contextlib.contextmanager
    def trial_mesh(self, seconds: float | None) -> Iterator[Mesh | None]:
        """Give a mesh over trial process groups for :meth:`attempt`; the given mesh for one rank.

        Args:
            seconds: that a rank waits in a collective for another one; None: see :class:`TrialMesh`.
        """
        if self.is_alone or self._mesh is None:
            yield self._mesh
            return
        import torch.distributed as dist

        self._trial = TrialMesh(self._mesh, dist.PrefixStore("trial", self._store), seconds)
        try:
            self.gather(None)  # no rank fails, and drops its groups, while another one still connects
            yield self._trial
        finally:
            self._trial.drop()
            self._trial = None

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
        """Gather every rank's value on every rank, in the order of ``ranks``.

        Raises:
            RankFailedError: a rank is gone.
        """
        if self.is_alone:
            return [value]
        assert self._group is not None, "a World is used inside of its with block"
        try:
            return self._exchanged(value)
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
        return [pickle.loads(buffer) for buffer in received]  # each ends where its pickle says, before the padding

    def attempt(self, function: Callable[[], T]) -> Attempt[T]:
        """Call ``function`` on every rank and tell every rank who failed; ``sys.exit`` counts as failing.

        What runs over a :meth:`trial_mesh` waits for a rank that has failed in it, or that has finished without it, no
        longer than its timeout.
        """
        result: T | None = None
        error: BaseException | None = None
        trial = self._trial
        self._attempts += 1
        started = time.monotonic()
        try:
            with trial.watched(self._store_of_attempt()) if trial is not None else contextlib.nullcontext():
                result = function()
        except (Exception, SystemExit) as caught:  # noqa: BLE001 - told to every rank; the caller decides what it means
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
            del error  # its traceback holds this frame: a trial's model would stay until the collector comes by

    def _store_of_attempt(self) -> Any:
        import torch.distributed as dist

        return dist.PrefixStore(f"attempt {self._attempts}", self._store)

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
        except RankFailedError:
            raise  # the other ranks know of it, or wait elsewhere for one that has failed, and not for this one
        except Exception as caught:  # noqa: BLE001 - raised again below, when every rank knows of it
            error = caught
        if self._was_told:  # inside of this block, as on the other ranks: no further message follows
            if error is None and not self.is_alone:
                error = BuildError(f"{what} went on after a failure that ended the other ranks")
            if error is not None:
                raise error
            return
        failures = self.gather(None if error is None else describe_failure(self.rank, error))
        self._was_told = any(failure is not None for failure in failures)
        if error is not None:
            raise error
        for failure in failures:
            if failure is not None:
                raise BuildError(f"{what} failed on rank {failure.rank}: {failure.kind}: {failure.text}")

    def agree(self, facts: Iterable[RankFact], *, hint: str) -> None:
        """Compare facts over all ranks; a single rank does not evaluate them.

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
        parts = {over: self._parts(over) if over is not None else [self.ranks] for over in scopes}
        message = first_difference(by_rank, parts)
        if message is not None:
            raise RankMismatchError(message, hint=hint)

    def _parts(self, *over: str) -> Sequence[Sequence[int]]:
        """The ranks that differ in nothing but their places along ``over``."""
        assert self._mesh is not None
        return ranks_along(self._mesh, [mesh_dim for mesh_dim in over if mesh_dim in self._mesh.sizes])


@contextlib.contextmanager
def together(mesh: Mesh | None, what: str) -> Iterator[None]:
    """Run a block on all ranks together; see :meth:`World.together`."""
    with World(mesh) as world, world.together(what):
        yield


def gather_along(mesh: Mesh, mesh_dim: str, value: T) -> list[T]:
    """Gather the values of the ranks that differ from this one in their place along ``mesh_dim`` only.

    A collective of the whole mesh.
    """
    with World(mesh) as world:
        values = dict(zip(world.ranks, world.gather(value), strict=True))
        row = next(ranks for ranks in ranks_along(mesh, (mesh_dim,)) if world.rank in ranks)
        return [values[rank] for rank in row]


def ranks_along(mesh: Mesh, over: Sequence[str], among: Iterable[tuple[str, tuple[int, ...]]] = ()) -> list[list[int]]:
    """Group the global ranks along mesh dimensions: ``[[0, 1], [2, 3]]``.

    Args:
        mesh: one that runs.
        over: the mesh dimensions.
        among: for some of them, the only places along it that count.
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
    """The function of slapo that the user called, e.g. ``"save"``."""
    frame: FrameType | None = sys._getframe(1)
    found = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("slapo_") and not module.startswith("slapo_runtime.rank_process"):
            found = frame.f_code.co_name
        frame = frame.f_back
    return found


def _bytes(buffer: bytearray) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _new_store(ranks: Sequence[int], rank: int) -> Any:
    """A part of the store under a name that no others ever had.

    Groups are connected through it, and not by ``torch.distributed.new_group``: for a part of the processes its name
    depends on how many groups each of them has, and comes back with the next group, which then finds the addresses of
    the one that is gone.
    """
    import torch.distributed as dist

    store: Any = dist.PrefixStore(f"slapo/{'-'.join(map(str, ranks))}", default_store())
    count = store.add(f"opened by rank {rank}", 1)  # every rank opens the same ones, so all count alike
    for other in ranks:
        if store.add(f"opened by rank {other}", 0) > count:  # it does not go on before this rank has come, too
            raise RankMismatchError(
                f"rank {other} made a call that rank {rank} did not make, before {_public_call()}()", hint=_ALL_CALL
            )
    return dist.PrefixStore(str(count), store)
