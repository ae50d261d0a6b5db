"""The accelerators of this process, by torch's own interface: CUDA is one of several kinds."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

__all__ = ["accelerator", "device_of", "fork_rng", "type_of_ranks"]


def accelerator() -> torch.device | None:
    """Give the current accelerator with its index, once the process uses it; None: nothing but the CPU so far."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or not getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        return None
    return device_of(kind.type)


def device_of(kind: str) -> torch.device:
    """Give the current device of a kind, e.g. ``"cuda"``, with its index; ``"cpu"`` has none."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def type_of_ranks() -> str:
    """Give the device type that torch.distributed runs on: an accelerator with its own backend, e.g. NCCL, else CPU."""
    import torch.distributed as dist

    kind = torch.accelerator.current_accelerator(check_available=True)
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))  # "cpu:gloo,cuda:nccl"
    own = backends.get(kind.type) if kind is not None else None
    return "cpu" if kind is None or own in (None, "gloo", "mpi", "fake") else kind.type


def fork_rng() -> AbstractContextManager[None]:
    """Fork the RNG states of the CPU and of the accelerators in use; without names, torch creates a context on each."""
    current = accelerator()
    if current is None:
        return torch.random.fork_rng(devices=[])
    count = torch.accelerator.device_count()
    used = [index for index in range(count) if index == current.index or torch.accelerator.memory_reserved(index)]
    return torch.random.fork_rng(devices=used, device_type=current.type)
