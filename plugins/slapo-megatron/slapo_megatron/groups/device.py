"""Megatron puts what it makes on the CUDA device that torch uses in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core import BuildError

if TYPE_CHECKING:
    import torch

    from slapo_core.spec.request import BuildRequest

__all__ = ["check_device", "require_device"]


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


def require_device(request: BuildRequest) -> None:
    """
    Args:
        request: of the build.

    Raises:
        BuildError: there is no CUDA device, or the model is on another one than Megatron takes.
    """
    import torch
    from megatron.core import parallel_state

    try:
        found = parallel_state.torch.cuda.current_device()  # asked as Megatron asks it
    except (AssertionError, RuntimeError) as error:
        raise BuildError(
            f"Megatron puts its buffers on CUDA devices, and torch has none here: {str(error).splitlines()[0]}",
            hint='target="torch" runs the same schedule on CPUs',
        ) from error
    taken = torch.device("cuda", found) if isinstance(found, int) else found
    for live in request.state.tensors():
        if live.is_local and live.tensor.device != taken:
            raise BuildError(
                f"'{live.name}' is on '{live.tensor.device}', but Megatron takes '{taken}', the device that torch uses",
                hint=f'build(device="{taken}")',
            )
