"""Save a checkpoint when the job's scheduler ends the job."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ArgumentError
from slapo_runtime.ranks.world import World

if TYPE_CHECKING:
    from slapo_runtime.engine import StatefulEngine


class SaveOnSignal:
    """Save once after a signal on any rank, at the end of the step; a context manager.

    Args:
        engine: of ``build``.
        directory: as for ``engine.save``.
        signals: e.g. ``SIGTERM``, by which schedulers announce the end of a job.
        keep: as for ``engine.save``.

    Example:
        ::

            with SaveOnSignal(engine, "checkpoints") as on_signal:
                for batch in batches:
                    engine.train_step(batch)
                    if on_signal.step_is_over():
                        break
    """

    def __init__(
        self,
        engine: StatefulEngine,
        directory: str | os.PathLike[str],
        *,
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        keep: int | None = None,
    ) -> None:
        self._engine, self._directory, self._signals, self._keep = engine, directory, signals, keep
        self._has_come = False
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SaveOnSignal:
        if threading.current_thread() is not threading.main_thread():
            raise ArgumentError("signals are handled in the main thread only", hint="use SaveOnSignal there")
        self._has_come = False
        for one in self._signals:
            self._former[one] = signal.signal(one, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one, former in self._former.items():
            signal.signal(one, former)
        self._former.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True

    def step_is_over(self) -> bool:
        """Save if a signal has come on any rank: a collective, after each step.

        Returns:
            whether it saved; the loop ends then.
        """
        has_come = any(World(self._engine._state.mesh).gather_once(self._has_come))
        self._has_come = False
        if has_come:
            self._engine.save(self._directory, keep=self._keep)
        return has_come
