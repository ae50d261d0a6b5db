"""Megatron's tracker replaced while engines are open. Imports Megatron: import it in functions.

Megatron has no function to set its tracker, so that this writes into its module; a test of this plugin looks after it.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as of_megatron

from slapo_megatron.random.tracker import FollowingTracker

__all__ = ["Following"]

_PLACE, _IS_MADE = "_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"
_open: set[object] = set()  # of this process: the first one replaces the tracker, and the last one puts it back
_before: tuple[Any, bool] = (None, False)


class Following:
    """From here to :meth:`stop`, ``get_cuda_rng_tracker()`` gives a tracker that follows torch's generators.

    Its names are those that Megatron has, or those of the user's script where it has seeded them, and ranks draw alike
    by a name where they did: those of one tensor-parallel group differ by ``"model-parallel-rng"``. One that nobody has
    any more has stopped.
    """

    def __init__(self) -> None:
        global _before
        self._end: weakref.finalize[Any, Any] | None = None
        tracker = getattr(of_megatron, _PLACE)
        if not _open:
            if _is_for_graphs(tracker):
                warnings.warn(
                    "Megatron's tracker of random states is one for CUDA graphs, and stays: activation checkpointing "
                    "by a schedule's .checkpoint() does not put its states back, so that what draws inside of "
                    "get_cuda_rng_tracker().fork() drops other elements in the recomputation; keep it out of what is "
                    "checkpointed",
                    stacklevel=4,
                )
                return
            _before = (tracker, getattr(of_megatron, _IS_MADE))
            setattr(of_megatron, _PLACE, _made(tracker))
            setattr(of_megatron, _IS_MADE, True)
        mark = object()
        _open.add(mark)
        self._end = weakref.finalize(self, _end, mark)
        self._end.atexit = False

    def stop(self) -> None:
        """It may be called again."""
        if self._end is not None:
            self._end()


def _end(mark: object) -> None:
    _open.discard(mark)
    if not _open:
        setattr(of_megatron, _PLACE, _before[0])
        setattr(of_megatron, _IS_MADE, _before[1])


def _is_for_graphs(tracker: Any) -> bool:
    return tracker is not None and bool(of_megatron.is_graph_safe_cuda_rng_tracker(tracker))


def _made(before: Any) -> FollowingTracker:
    """With the names of the tracker that was there, or with Megatron's, seeded by place as Megatron seeds them."""
    tracker = FollowingTracker()
    if before is not None and before.is_initialized():
        tracker.follow(before.get_states())
        return tracker
    tensor = parallel_state.get_tensor_model_parallel_rank()
    expert, expert_tensor = (
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )
    tracker.add(of_megatron._DATA_PARALLEL_RNG_TRACKER_NAME, 0)
    tracker.add(of_megatron._MODEL_PARALLEL_RNG_TRACKER_NAME, 2718 + tensor)
    tracker.add(of_megatron._EXPERT_PARALLEL_RNG_TRACKER_NAME, 1024 + 100 * expert + expert_tensor)
    return tracker
