"""Independent RNG streams for each stage and micro-batch of a training step.

A data loader uses torch's default generator too, and must get the same numbers on all ranks of a replica, whatever
their stages use. So the default generator only gives the seed of the step's streams; it advances by this one number on
every rank if any stage used its stream, and not otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["advance", "start_stream", "step_seed", "was_used"]


@contextlib.contextmanager
def step_seed(device: torch.device) -> Iterator[int]:
    """Give the seed of a step; restore the default generators afterwards.

    Args:
        device: of the stages; the CPU's generator is restored too.
    """
    looking_ahead = torch.Generator()
    looking_ahead.set_state(torch.default_generator.get_state())
    seed = int(torch.randint(1 << 62, (), generator=looking_ahead, device="cpu"))
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type="cuda" if device.type == "cpu" else device.type):
        yield seed


def advance() -> None:
    """Advance the default generator past the number that seeded this step."""
    torch.randint(1 << 62, (), device="cpu")


def start_stream(seed: int, stage: int, number: int, device: torch.device) -> list[torch.Tensor]:
    """Seed the stream of a stage and a micro-batch, independently of the schedule.

    Args:
        seed: of the step.
        stage: its index.
        number: of the micro-batch.
        device: of the stage; the CPU's generator is seeded too.

    Returns:
        for :func:`was_used`.
    """
    own = hash((seed, stage, number)) & ((1 << 63) - 1)
    torch.default_generator.manual_seed(own)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(own)
    return _states(device)


def was_used(since: list[torch.Tensor], device: torch.device) -> bool:
    """Return whether the stream was used since it began."""
    return any(not torch.equal(one, other) for one, other in zip(since, _states(device), strict=True))


def _states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.default_generator.get_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states
