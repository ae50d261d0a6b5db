"""A run on all ranks that ends on all of them, also where one raises, or leaves out a collective of the others."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from slapo_core.ranks.failures import Failure
from slapo_core.ranks.stand_ins import StandIns

__all__ = ["Run"]

_PATIENCE = 1.0  # seconds that a rank which is done waits for the others before it takes them for stuck, and
_SLOWER = 5.0  # so many times as long as it took itself
_LOOK = 0.05  # seconds between two looks at what the others have published


class Run:
    """This rank's part of one run: a context manager around it, and what there is to do while waiting for the others.

    A rank that raises says so in the store and breaks the connections that the run goes through, which ends the wait of
    its partners; they break theirs, and so on. A rank that is done does likewise when it hears of a failure, and when
    the others take far longer than it did: they wait for a collective that it never took part in. (To those that only
    compute it does no harm: a rank that is done would not answer anyway.)

    Args:
        stand_ins: the groups that the run goes through.
        store: of this run alone.
        rank: this process's global rank.
        ranks: all that take part.
    """

    def __init__(self, stand_ins: StandIns, store: Any, rank: int, ranks: Sequence[int]) -> None:
        self._stand_ins, self._store, self._rank, self._ranks = stand_ins, store, rank, ranks
        self._started, self._deadline, self._next_look = time.monotonic(), 0.0, 0.0
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Run:
        if self._stand_ins.on_gpu:
            store = self._store.clone()
            self._watcher = threading.Thread(target=self._watch, args=(store,), name="slapo-run-watch", daemon=True)
            self._watcher.start()
        self._started = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._stand_ins.on_gpu:
                torch.cuda.synchronize()  # its collectives are over, and their errors are errors of this run
        except BaseException as late:
            error = late
            raise
        finally:
            self._over.set()
            if self._watcher is not None:
                self._watcher.join()
            if error is not None:
                self._store.set("failed", str(self._rank))
                self._stand_ins.break_off()
            now = time.monotonic()
            self._deadline = now + max(_PATIENCE, _SLOWER * (now - self._started))

    def waiting(self) -> None:
        """To be called again and again by a rank that is done, until all are."""
        now = time.monotonic()
        if self._stand_ins.is_broken or now < self._next_look:
            return
        self._next_look = now + _LOOK
        late = now > self._deadline
        if late:
            self._store.set(f"done {self._rank}", "")
        if late or self._store.check(["failed"]):
            self._stand_ins.break_off()

    def explained(self, failure: Failure) -> Failure:
        """With the reason for a lost connection, where the others had been done."""
        if not failure.lost:
            return failure
        done = [rank for rank in self._ranks if self._store.check([f"done {rank}"])]
        if not done:
            return failure
        ranks = f"rank{'s' if len(done) > 1 else ''} {', '.join(map(str, done))}"
        text = f"it waits in a collective, while {ranks} finished without entering it"
        return dataclasses.replace(failure, text=f"{text} ({failure.text})")

    def _watch(self, store: Any) -> None:
        """NCCL waits on the GPU, and hears nothing of a connection that another rank broke: this rank ends its own."""
        while not self._over.wait(_LOOK):
            if store.check(["failed"]) or any(store.check([f"done {rank}"]) for rank in self._ranks):
                self._stand_ins.break_off()
                return
