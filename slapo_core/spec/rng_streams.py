"""Random numbers of a training step: a stream for each stage and micro-batch, and one number of everybody's own.

A loader draws of torch's stream too, and must draw alike on all ranks of a replica, whatever their stages draw. So the
stages' streams begin at a seed that torch's stream gives; it moves on by that one number on every rank, if any stage
drew something, and not at all else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["advance", "start_stream", "step_seed", "was_used"]


@contextlib.contextmanager
def step_seed(device: torch.device) -> Iterator[int]:
    """Give the seed of a step; afterwards torch's stream is where it was.

    Args:
        device: where stages draw, beside the CPU.
    """
    looking_ahead = torch.Generator()
    looking_ahead.set_state(torch.default_generator.get_state())
    seed = int(torch.randint(1 << 62, (), generator=looking_ahead, device="cpu"))
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type="cuda" if device.type == "cpu" else device.type):
        yield seed


def advance() -> None:
    """After a step in which a stage of the replica drew: behind the number that was its seed."""
    torch.randint(1 << 62, (), device="cpu")


def start_stream(seed: int, stage: int, number: int, device: torch.device) -> list[torch.Tensor]:
    """Begin the stream of a stage and a micro-batch: the same under every schedule, another one for each.

    Args:
        seed: of the step.
        stage: its index.
        number: of the micro-batch.
        device: where the stage draws, beside the CPU.

    Returns:
        for :func:`was_used`.
    """
    own = hash((seed, stage, number)) & ((1 << 63) - 1)
    torch.default_generator.manual_seed(own)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(own)
    return _states(device)


def was_used(since: list[torch.Tensor], device: torch.device) -> bool:
    """Whether anything was drawn since the stream began."""
    return any(not torch.equal(one, other) for one, other in zip(since, _states(device), strict=True))


def _states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.default_generator.get_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states
