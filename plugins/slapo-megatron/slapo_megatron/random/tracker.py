"""Megatron's tracker of random states, which follows torch's. Imports Megatron: import it in functions.

Megatron's layers draw inside of ``get_cuda_rng_tracker().fork()``. Its own tracker keeps a state for each name, which
moves on with every draw, beside torch's: activation checkpointing that is not Megatron's own puts torch's generators
back for the recomputation, and not that state, so that other elements are dropped than in the forward, without a word.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

__all__ = ["FollowingTracker"]

_MODEL = "model-parallel-rng"  # what fork() takes by default
_STRIDE = 0x9E3779B97F4A7C15  # odd: seeds that differ give streams that do, in the low 32 bits too


class FollowingTracker(CudaRNGStatesTracker):  # type: ignore[misc]
    """A fork draws from generators that are seeded anew: by a number of torch's generator of the CPU and a name's seed.

    Ranks that have the same seed for a name, and whose generators stand alike, draw alike; others do not. Who puts
    torch's generators back, draws the same again, on the CPU and on the GPU. There is nothing to keep in a checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self.states_: dict[str, torch.Tensor] = {}

    def add(self, name: str, seed: int) -> None:
        """A name to fork by.

        Args:
            name: e.g. ``"model-parallel-rng"``.
            seed: the same on ranks that are to draw alike.
        """
        if name in self.states_:
            raise ValueError(f"there is a random state {name!r} already")
        self._is_initialized = True
        self.states_[name] = torch.tensor([seed % 2**63])

    def follow(self, states: Mapping[str, Any]) -> None:
        """Take the names of another tracker; where its states are alike on some ranks, so are the seeds.

        Args:
            states: as its ``get_states`` gives them.
        """
        for name, state in states.items():
            digest = hashlib.sha256(bytes(state.cpu().reshape(-1).view(torch.uint8).tolist())).digest()
            self.add(name, int.from_bytes(digest[:7], "big"))

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL) -> Iterator[None]:
        """Draw from the stream of a name; behind it, torch's generators go on as before, one number further if it drew.

        Raises:
            KeyError: the name is not known.
        """
        if name not in self.states_:
            known = ", ".join(map(repr, self.states_)) or "none"
            raise KeyError(f"there is no random state {name!r}; there are {known}")
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
    """What torch's generator of the CPU is about to give; it stays where it is."""
    ahead = torch.Generator()
    ahead.set_state(state)
    return int(torch.randint(2**62, (), generator=ahead, device="cpu"))


def _generators() -> list[torch.Generator]:
    """Of the CPU, and of the current GPU once there is one in use."""
    found = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found
