"""The devices and RNG states of this process."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_simulated: torch.device | None = None


def accelerator() -> torch.device | None:
    """Return the current accelerator with its index; None while the process uses the CPU only."""
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or not getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        return None
    return device_of(kind.type)


def device_of(kind: str) -> torch.device:
    """Return the current device of a type, e.g. ``"cuda"``, with its index; ``"cpu"`` has none."""
    import torch

    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def type_of_ranks() -> str:
    """Return the device type of torch.distributed: an accelerator with a backend, e.g. NCCL, else CPU."""
    import torch
    import torch.distributed as dist

    kind = torch.accelerator.current_accelerator(check_available=True)
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))  # "cpu:gloo,cuda:nccl"
    own = backends.get(kind.type) if kind is not None else None
    return "cpu" if kind is None or own in (None, "gloo", "mpi", "fake") else kind.type


def kernel_device(tensor: torch.Tensor) -> torch.device:
    """Return the device by which to choose a tensor's kernels: its own, or the one that is simulated."""
    return tensor.device if _simulated is None else _simulated


def is_simulated() -> bool:
    """Return whether `kernel_device` returns a device that this process may lack."""
    return _simulated is not None


@contextmanager
def simulated_device(kind: str) -> Iterator[None]:
    """Let fake tensors on the CPU take the kernels of another type of device in a block."""
    import torch

    global _simulated
    before, _simulated = _simulated, torch.device(kind)
    try:
        yield
    finally:
        _simulated = before


def fork_rng() -> AbstractContextManager[None]:
    """Fork the RNG states of the CPU and of the accelerators in use; torch alone would open all."""
    import torch

    current = accelerator()
    if current is None:
        return torch.random.fork_rng(devices=[])
    count = torch.accelerator.device_count()
    used = [index for index in range(count) if index == current.index or torch.accelerator.memory_reserved(index)]
    return torch.random.fork_rng(devices=used, device_type=current.type)


def start_single_process_group(device_type: str, backend: str | None = None) -> None:
    """Start a process group of one rank, until the process ends.

    Args:
        device_type: of the model, e.g. ``"cpu"``.
        backend: None: gloo for CPUs, and torch's own choice for other devices.
    """
    import torch.distributed as dist

    if backend is None:
        backend = "gloo" if device_type == "cpu" else dist.get_default_backend_for_device(device_type)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_end_alone)


def _end_alone() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
