"""A process group for a process that is alone: runtimes that communicate in any case want one."""

from __future__ import annotations

import atexit

__all__ = ["start_alone"]


def start_alone(device_type: str, backend: str | None = None) -> None:
    """Make a process group of one; it stays until the process ends.

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
