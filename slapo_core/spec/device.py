"""What one device and its links can do: the numbers that a step's time is predicted with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["DeviceSpec", "Link"]


@dataclass(frozen=True)
class Link:
    """What connects the ranks along a mesh dimension.

    Args:
        bandwidth: bytes per second that one rank sends.
        latency: seconds that a message of no bytes takes.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class DeviceSpec:
    """A device, for the roofline of a step's time.

    Args:
        name: e.g. ``"NVIDIA H100 80GB HBM3"``.
        flops: floating-point operations per second in matrix products, by dtype: ``{"bfloat16": 6.5e14}``.
        bandwidth: bytes per second between the device and its memory.
        launch: seconds that an operation takes however little it does.
        memory: bytes of the device's memory; None where that is not known.
        links: what connects ranks, by mesh dimension; ``"*"`` stands for all others.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    memory: int | None = None
    links: Mapping[str, Link] = field(default_factory=dict)
