"""Choose the device of a case, and the backend of its ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core.errors import ArgumentError
from slapo_testing.private import tree_map_only

_CPU = torch.device("cpu")


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Choose the device of a case.

    Args:
        device: device of the case, e.g. ``"cuda"``; None: the accelerator if it has its own backend for ranks (NCCL,
            XCCL), else the CPU.

    Raises:
        ArgumentError: this machine has no such device.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return found if found is not None and _backend(found) != "gloo" else _CPU
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"unknown device {device!r}", hint='device="cuda", or device="cpu"') from error
    if chosen.type not in ("cpu", found.type if found is not None else "cpu"):
        raise ArgumentError(f"device '{chosen}' is not available on this machine", hint=f'device="{found or _CPU}"')
    return chosen


def is_shared(device: torch.device, world_size: int) -> bool:
    """Return whether ranks share an accelerator: a device with an index, or too few devices."""
    if device.type == "cpu" or world_size == 1:
        return False
    return device.index is not None or torch.accelerator.device_count() < world_size


def backend_for(device: torch.device, world_size: int) -> str:
    """Return the backend of ranks on a device; gloo if they share it, which NCCL refuses."""
    return "gloo" if is_shared(device, world_size) else _backend(device)


def _backend(device: torch.device) -> str:
    return dist.Backend.default_device_backend_map.get(device.type, "gloo")


def move(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device; a module is moved in place."""
    if isinstance(value, nn.Module):
        return value.to(device)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
