"""Random numbers of a training step: a stream for each stage and micro-batch, and nothing that others draw changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["own_random_state", "start_stream"]


@contextlib.contextmanager
def own_random_state(device: torch.device) -> Iterator[int]:
    """Give a seed for the step, one number of torch's stream; afterwards the stream goes on behind it.

    So what a loader draws stays the same on all ranks of a replica, whatever their stages draw.

    Args:
        device: where stages draw, beside the CPU.
    """
    seed = int(torch.randint(1 << 62, (), device="cpu"))
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=None if device.type == "cpu" else device.type):
        yield seed


def start_stream(seed: int, stage: int, number: int, device: torch.device) -> None:
    """Begin the stream of a stage and a micro-batch: the same under every schedule, another one for each.

    Args:
        seed: of the step.
        stage: its index.
        number: of the micro-batch.
        device: where the stage draws, beside the CPU.
    """
    own = hash((seed, stage, number)) & ((1 << 63) - 1)
    torch.default_generator.manual_seed(own)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(own)
