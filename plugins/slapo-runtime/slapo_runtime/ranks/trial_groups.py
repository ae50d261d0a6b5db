"""Trials over ranks: process groups with a timeout, and the exceptions of ranks as text."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Generic, TypeVar

from slapo_core.errors import RankFailedError
from slapo_core.layout import Mesh
from slapo_runtime.private import new_group_among, set_timeout

T = TypeVar("T")

# Messages of gloo and NCCL about a lost partner, for which neither has an exception class.
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|was aborted)|broken pipe", re.IGNORECASE)
_INSIDE = re.compile(r"/(slapo_[a-z]+|torch)/")
_IN_MODULE = "in module "
_SIGN_OF_LIFE = 3.0  # seconds for the other ranks to report a lost connection, too


@dataclass(frozen=True)
class Failure:
    """An exception of some rank, as text that can be sent.

    Args:
        rank: the global rank.
        kind: the exception's class, e.g. ``"ValueError"``.
        text: its message.
        where: the line of the user's code, e.g. ``"train.py:12"``; "" if there is none.
        lost: whether it only reports a collective that another rank aborted.
        module: the path of the innermost module that ran, e.g. ``"layer.0.fc"``; "" if it is unknown.
    """

    rank: int
    kind: str
    text: str
    where: str
    lost: bool = False
    module: str = ""

    def __str__(self) -> str:
        module = f"in '{self.module}'" if self.module else ""
        place = ", ".join(filter(None, (module, self.where)))
        return f"{self.kind}: {self.text}" + (f" ({place})" if place else "")


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """The outcome of a function that every rank called.

    Args:
        result: this rank's; None if it raised.
        error: this rank's own exception.
        failures: the original exceptions, in the order of ranks; the same on every rank. Ranks that only lost the
            connection to a failed rank are left out.
    """

    result: T | None
    error: BaseException | None
    failures: tuple[Failure, ...]

    def value(self) -> T:
        """Return this rank's result, if no rank failed."""
        assert not self.failures
        return self.result  # type: ignore[return-value]


def describe_failure(rank: int, error: BaseException) -> Failure:
    """Return an exception as text, with its innermost line outside of torch and slapo."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not _INSIDE.search(frame.filename.replace("\\", "/"))]
    where = f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""
    modules = (note[len(_IN_MODULE) :] for note in getattr(error, "__notes__", ()) if note.startswith(_IN_MODULE))
    is_lost = any(map(_says_lost, chain_of(error)))
    return Failure(rank, type(error).__name__, _text(error), where, lost=is_lost, module=next(modules, ""))


@contextlib.contextmanager
def naming_module(paths: Mapping[int, str]) -> Iterator[None]:
    """Note the innermost module that ran at an exception of the block, for :func:`describe_failure`.

    Args:
        paths: id of a module -> its path.
    """
    try:
        yield
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        found = (path for frame in reversed(frames) if (path := module_of(frame, paths)))
        if (path := next(found, None)) is not None:
            error.add_note(f"{_IN_MODULE}{path}")
        raise


def module_of(frame: FrameType, paths: Mapping[int, str]) -> str | None:
    """Return the path of the module that a frame's first argument is."""
    names = frame.f_code.co_varnames[:1]  # self, or module where a forward was wrapped
    return paths.get(id(frame.f_locals.get(names[0]))) if names else None


def causes(failures: Sequence[Failure | None], ranks: Sequence[int]) -> tuple[Failure, ...]:
    """Return the original failures; all, if every rank lost a connection.

    Args:
        failures: of each rank; None of a successful one.
        ranks: all of them.
    """
    found = tuple(failure for failure in failures if failure is not None)
    own = tuple(failure for failure in found if not failure.lost)
    done = [str(rank) for rank, failure in zip(ranks, failures, strict=True) if failure is None]
    if own or not done:
        return own or found
    text = f"it waits in a collective, while rank{'s' * (len(done) > 1)} {', '.join(done)} finished without entering it"
    return tuple(dataclasses.replace(failure, text=f"{text} ({failure.text})") for failure in found)


def lost_rank(store: Any, rank: int, ranks: Sequence[int]) -> RankFailedError:
    """Make the error for a lost connection, with the ranks that left or died.

    Args:
        store: with the reason of each rank that left early, as ``"left <rank>"``.
        rank: this process's.
        ranks: all of them.
    """
    failures: dict[int, str] = {}
    try:
        store.set(f"lost {rank}", "")
        deadline = time.monotonic() + _SIGN_OF_LIFE
        while True:
            left = {other: store.get(f"left {other}").decode() for other in ranks if store.check([f"left {other}"])}
            failures = {other: text for other, text in left.items() if not text.startswith(RankFailedError.__name__)}
            silent = [other for other in ranks if other not in left and not store.check([f"lost {other}"])]
            if failures or not silent or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        failures = failures or dict.fromkeys(silent, "no sign of life: the process ended, or hangs")
    except RuntimeError as error:  # the process with the store ended, too
        failures = {min(ranks): f"the store of the process group, on rank 0, is lost: {error}"}
    reasons = "; ".join(f"rank {other}: {text}" for other, text in failures.items()) or "no rank reports a reason"
    first = min(failures, default=None)
    return RankFailedError(f"the connection to another rank is lost; {reasons}", failures=failures, first=first)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as inner:  # noqa: BLE001 - __str__ of a user's class may raise
        return f"(str(error) raised {type(inner).__name__})"


def _says_lost(error: BaseException) -> bool:
    return isinstance(error, (RuntimeError, ConnectionError)) and _LOST.search(_text(error)) is not None


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its causes and its contexts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


SECONDS = 60.0
"""The smallest timeout of a collective in a trial."""

_TIMES = 10.0  # the timeout, in durations of an earlier trial
_LOOK = 0.05  # seconds between two reads of the store


class TrialMesh(Mesh):
    """The dimensions and ranks of a mesh, over new process groups with a timeout.

    A rank that raises leaves the others waiting in a collective. It drops its groups, which ends the others' wait at
    once (gloo: unless there are other references), or the timeout does. Then all ranks make the groups again, under
    the same names.

    Args:
        mesh: of several running ranks, which all make it together.
        store: for this mesh alone.
        seconds: the timeout; None: the larger of 60 and ten times the duration of :meth:`allow`.
    """

    def __init__(self, mesh: Mesh, store: Any, seconds: float | None) -> None:
        super().__init__(mesh.sizes, rank=mesh.global_rank, device_mesh=mesh.device_mesh)
        self._original, self._store = mesh.device_mesh, store
        self._is_given, self._seconds = seconds is not None, seconds or SECONDS
        self._groups: list[Any] = []
        self._made = 0
        self.open()

    def open(self) -> None:
        """Make the groups again."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        assert self._original is not None
        self.drop()
        self._made += 1
        for mesh_dim in self.sizes:
            original = self._original.get_group(mesh_dim)
            ranks = dist.get_process_group_ranks(original)
            store = dist.PrefixStore(f"{self._made} {mesh_dim} {'-'.join(map(str, ranks))}", self._store)
            self._groups.append(new_group_among(original, store, f"{original.group_name} of a trial", self._timeout()))
        self._device_mesh = DeviceMesh.from_group(
            self._groups, self._original.device_type, self._original.mesh, mesh_dim_names=tuple(self.sizes)
        )

    def drop(self) -> None:
        """Drop the groups, so that ranks waiting for this one raise."""
        import torch.distributed as dist

        self._device_mesh = None
        while self._groups:
            group = self._groups.pop()
            group.abort()  # NCCL
            dist.destroy_process_group(group)

    def allow(self, seconds: float) -> None:
        """Raise the timeout to ten times a duration."""
        if not self._is_given and _TIMES * seconds > self._seconds:
            self._seconds = _TIMES * seconds
            for group in self._groups:
                set_timeout(group, self._timeout())

    @contextlib.contextmanager
    def watched(self, store: Any) -> Iterator[None]:
        """Abort this rank's groups when another rank fails in a trial.

        NCCL waits on the GPU, and does not learn of a group that another rank dropped: a thread of this rank reads the
        store, and aborts its own groups before NCCL's watchdog would end the process.

        Args:
            store: of this trial alone.
        """
        if not any("nccl" in group.name() for group in self._groups):
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(store.clone(), over), daemon=True)
        thread.start()
        try:
            yield
            store.set("done", "")
        except BaseException:
            store.set("failed", "")
            raise
        finally:
            over.set()
            thread.join()

    def _watch(self, store: Any, over: threading.Event) -> None:
        deadline = float("inf")  # after a rank has finished
        while not over.wait(_LOOK):
            if deadline == float("inf") and store.check(["done"]):
                deadline = time.monotonic() + 0.9 * self._seconds
            if store.check(["failed"]) or time.monotonic() > deadline:
                for group in self._groups:
                    group.abort()
                return

    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)
