"""The ranks that verify together: every decision is taken by all of them, or by none."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from slapo_core.errors import RankMismatchError

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh

__all__ = ["Attempt", "Failure", "World"]

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """An exception of some rank, as text that can travel."""

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
    """The processes of a mesh, or this one alone; a context manager.

    Messages go through a group of their own: a rank that fails inside the model must not answer the collective in
    which the others wait with one of ours.

    Args:
        mesh: the schedule's mesh; None, or one rank, means alone.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self._device_mesh = mesh.device_mesh if mesh is not None and mesh.world_size > 1 else None
        self._group: Any = None
        self.size = mesh.world_size if self._device_mesh is not None and mesh is not None else 1
        self.rank = 0

    def __enter__(self) -> World:
        if self._device_mesh is not None:
            import torch.distributed as dist

            ranks = self._device_mesh.mesh.flatten().tolist()
            part = len(ranks) != dist.get_world_size()
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=part)
            self.rank = ranks.index(dist.get_rank())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._group is not None:
            import torch.distributed as dist

            dist.destroy_process_group(self._group)
            self._group = None

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank."""
        if self._group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def attempt(self, function: Callable[[], T]) -> Attempt[T]:
        """Call ``function`` on every rank and tell every rank who failed."""
        result, error = None, None
        try:
            result = function()
        except Exception as caught:  # noqa: BLE001 - told to every rank; the caller decides what it means
            error = caught
        failure = None if error is None else _failure(self.rank, error)
        return Attempt(result, error, tuple(found for found in self.gather(failure) if found is not None))

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Compare facts, by name, over all ranks.

        Raises:
            RankMismatchError: the first fact that is not the same everywhere, with both values; on every rank.
        """
        everybody: Sequence[Mapping[str, str]] = self.gather(dict(facts))
        for name in dict.fromkeys(name for own in everybody for name in own):
            for rank, own in enumerate(everybody):
                first, other = everybody[0].get(name, "nothing"), own.get(name, "nothing")
                if first != other:
                    raise RankMismatchError(
                        f"{name} is not the same on every rank: {first} on rank 0, {other} on rank {rank}",
                        hint="make every rank build the same model (torch.manual_seed), apply the same steps, and call "
                        "verify with the same inputs",
                    )


def _failure(rank: int, error: Exception) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    inside = ("/slapo_core/verification/", "/torch/")
    theirs = [frame for frame in frames if not any(part in frame.filename.replace("\\", "/") for part in inside)]
    where = f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""
    return Failure(rank, type(error).__name__, str(error), where)
