"""Replace Megatron's RNG tracker by one that follows torch's RNG state. Imports Megatron: import it in functions."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as of_megatron
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from slapo_megatron.private import rng_tracker_names

_MODEL = "model-parallel-rng"  # what fork() takes by default
_STRIDE = 0x9E3779B97F4A7C15  # odd: seeds that differ give streams that do, in the low 32 bits too


class FollowingTracker(CudaRNGStatesTracker):  # type: ignore[misc]
    """A fork seeds the generators by a number of torch's CPU generator and a name's seed.

    Ranks with equal seeds for a name and equal RNG states use equal streams; others do not. Restoring
    torch's RNG state repeats the stream, on the CPU and on the GPU. A checkpoint needs nothing more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.states_: dict[str, torch.Tensor] = {}

    def add(self, name: str, seed: int) -> None:
        """A name to fork by.

        Args:
            name: e.g. ``"model-parallel-rng"``.
            seed: equal on ranks with equal streams.
        """
        if name in self.states_:
            raise ValueError(f"there is a random state {name!r} already")
        self._is_initialized = True
        self.states_[name] = torch.tensor([seed % 2**63])

    def follow(self, states: Mapping[str, Any]) -> None:
        """Take the names of another tracker; ranks with equal states get equal seeds.

        Args:
            states: as its ``get_states`` gives them.
        """
        for name, state in states.items():
            digest = hashlib.sha256(bytes(state.cpu().reshape(-1).view(torch.uint8).tolist())).digest()
            self.add(name, int.from_bytes(digest[:7], "big"))

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL) -> Iterator[None]:
        """Use the stream of a name; afterwards torch's generators continue, one number further if it was used.

        Raises:
            KeyError: the name is not known.
        """
        if name not in self.states_:
            known = ", ".join(map(repr, self.states_)) or "none"
            raise KeyError(f"no RNG state {name!r}; there are {known}")
        generators = _generators()
        before = [generator.get_state() for generator in generators]
        seed = (_next_number(before[0]) + (int(self.states_[name]) + 1) * _STRIDE) % 2**64
        for generator in generators:
            generator.manual_seed(seed)
        begun = [generator.get_state() for generator in generators]
        try:
            yield
        finally:
            was_used = any(
                not torch.equal(one, generator.get_state()) for one, generator in zip(begun, generators, strict=True)
            )
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
            if was_used:
                torch.randint(2**62, (), device="cpu")


def _next_number(state: torch.Tensor) -> int:
    """Return the next number of torch's CPU generator, without advancing it."""
    ahead = torch.Generator()
    ahead.set_state(state)
    return int(torch.randint(2**62, (), generator=ahead, device="cpu"))


def _generators() -> list[torch.Generator]:
    """Return the generators of the CPU, and of the current GPU if initialized."""
    found = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


_PLACE, _IS_MADE = "_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"
_open: set[object] = set()  # of this process: the first one replaces the tracker, and the last one puts it back
_before: tuple[Any, bool] = (None, False)


class Following:
    """From here to :meth:`stop`, ``get_cuda_rng_tracker()`` gives a tracker that follows torch's generators.

    Its names are Megatron's, or those that the user's script has seeded, and the same ranks use equal streams by a name
    as before: those of one tensor-parallel group differ by ``"model-parallel-rng"``. An unreferenced instance has
    stopped.
    """

    def __init__(self) -> None:
        global _before
        self._end: weakref.finalize[Any, Any] | None = None
        tracker = getattr(of_megatron, _PLACE)
        if not _open:
            if _is_for_graphs(tracker):
                warnings.warn(
                    "Megatron's tracker of random states is one for CUDA graphs, and stays: activation checkpointing "
                    "by a schedule's .checkpoint() does not put its states back, so that dropout inside of "
                    "get_cuda_rng_tracker().fork() drops other elements in the recompute; keep it out of "
                    "checkpointed modules",
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
    for name, seed in zip(rng_tracker_names(), (0, 2718 + tensor, 1024 + 100 * expert + expert_tensor), strict=True):
        tracker.add(name, seed)
    return tracker
