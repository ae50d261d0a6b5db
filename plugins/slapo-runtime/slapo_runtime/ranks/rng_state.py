"""Compare and synchronize RNG states across ranks."""

from __future__ import annotations

import hashlib
import random
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from slapo_core.layout import accelerator

if TYPE_CHECKING:
    from slapo_runtime.ranks.world import World


OTHER = ("Python's random module", "NumPy's global generator")


def torch_states() -> dict[str, bytes]:
    """Return torch's RNG states: of the CPU and, once it is used, of the current GPU."""
    states = {"the CPU": torch.get_rng_state()}
    device = accelerator()
    if device is not None:
        states["the GPU"] = torch.get_device_module(device).get_rng_state()
    return {device: bytes(state.tolist()) for device, state in states.items()}


def restore(states: Mapping[str, bytes]) -> None:
    """Put torch's generators where :func:`torch_states` found them."""
    for device, content in states.items():
        state = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if device == "the CPU":
            torch.set_rng_state(state)
        elif torch.accelerator.is_available():
            torch.get_device_module().set_rng_state(state)


def foreign_states() -> dict[str, str]:
    """A digest of the random states that are not torch's; NumPy's where something has imported it."""
    found = {OTHER[0]: repr(random.getstate())}
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    if numpy_random is not None:
        name, keys, *rest = numpy_random.get_state()
        found[OTHER[1]] = f"{name} {keys.tobytes()!r} {rest}"
    return {source: hashlib.sha256(state.encode()).hexdigest() for source, state in found.items()}


def synchronize(world: World, ranks: Sequence[int]) -> list[str]:
    """Give ``ranks`` the first one's RNG states of torch, of the devices in use on each: a collective of ``world``.

    Returns:
        the devices on which the states differed.
    """
    by_rank = dict(zip(world.ranks, world.gather(torch_states()), strict=True))
    states = [by_rank[rank] for rank in ranks]
    first = {device: state for device, state in states[0].items() if all(device in own for own in states)}
    differing = [device for device in first if any(own[device] != first[device] for own in states)]
    if differing:
        restore(first)
    return differing


def synchronize_and_warn(world: World, problem: str, *, stacklevel: int) -> list[str]:
    """Synchronize torch's RNG states, with a warning where they differed: a collective.

    Args:
        world: the tensor-parallel ranks of a replica.
        problem: for the warning, e.g. ``"differs"``.
        stacklevel: of the warning.

    Returns:
        the other generators, of :data:`OTHER`, whose states differ.
    """
    differing = synchronize(world, world.ranks)
    if differing:
        warnings.warn(
            f"torch's random state on {' and '.join(differing)} {problem} on ranks "
            f"{', '.join(map(str, world.ranks))}, which must drop the same elements of their replicas: all of them "
            f"have rank {world.ranks[0]}'s now; call torch.manual_seed(seed) with the same seed on all ranks of a "
            "replica",
            stacklevel=stacklevel + 1,
        )
    others = world.gather(foreign_states())
    return [source for source in OTHER if len({foreign.get(source) for foreign in others} - {None}) > 1]
