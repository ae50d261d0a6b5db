"""Megatron puts what it makes on the device that torch uses in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core import BuildError

if TYPE_CHECKING:
    import torch

__all__ = ["check_device"]


def check_device(device: torch.device | None) -> None:
    """
    Args:
        device: where the user wants the model; None where nothing is said.

    Raises:
        BuildError: another one than Megatron takes.
    """
    if device is None or device.index is None or device.type == "cpu":
        return
    import torch

    taken = torch.get_device_module(device).current_device()
    if taken != device.index:
        raise BuildError(
            f"build(device='{device}'), but Megatron takes the device that torch uses, {device.type}:{taken}",
            hint=f'torch.{device.type}.set_device({device.index}) first, or device="{device.type}:{taken}"',
        )
