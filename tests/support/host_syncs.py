"""Find what would make the host wait for a device in a training step, on the CPU: calls that read a tensor's value.

Only calls of the project count: those whose nearest frame outside of torch lies in a package ``slapo_*``. A runtime, an
optimizer, a loss or a scheduler of the user's may wait as it likes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = frozenset(
    {
        "aten::_local_scalar_dense",  # item, tolist, bool, int, float
        "aten::is_nonzero",
        "aten::equal",
        "aten::nonzero",
        "aten::masked_select",
        "aten::_unique2",
        "aten::repeat_interleave.Tensor",
    }
)
_COPIES = (torch.tensor, torch.as_tensor)  # of the host's numbers, to a device: from memory that is not pinned
_BLOCKING = (torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist)
_ON_THE_HOST = {  # what works on tensors of the CPU wherever the model is
    "runtime/losses.py": ("read",),  # a copy in pinned memory, when the device has begun the step
    "runtime/stages/runner.py": ("step_seed", "advance", "start_stream", "was_used"),  # the default generator
    "runtime/world.py": ("_exchanged", "<genexpr>"),  # messages over gloo
    "deepspeed/pipeline.py": ("forward",),  # the number of a micro-batch
    "megatron/without_gpu.py": ("_number",),  # what lets Megatron run in tests
}


def _caller() -> str:
    """Return the project's line that the call comes from; "" where it comes from elsewhere."""
    frame = sys._getframe(2)
    while frame is not None:
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        in_torch = "/site-packages/torch/" in name and "/torch/optim/" not in name  # optimizers read their own counts
        in_library = "/lib/python3" in name and "/site-packages/" not in name
        if "/site-packages/" not in name and "/slapo_" in name:
            file = name.rsplit("/slapo_", 1)[1]
            return "" if function in _ON_THE_HOST.get(file, ()) else f"{file}:{frame.f_lineno} {function}"
        if not (in_torch or in_library or name.startswith("<") or name == __file__):
            return ""
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class _Reads(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        by_mask = name == "aten::index.Tensor" and any(
            one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        if name in _READS or by_mask:
            caller = _caller()
            if caller:
                self._found.append(f"{name} in {caller}")
        return func(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_device = func in _COPIES and isinstance(kwargs.get("device"), torch.device)
        if to_device or func in _BLOCKING:
            caller = _caller()
            if caller:
                self._found.append(f"{func.__name__} in {caller}")
        return func(*args, **kwargs)


@contextmanager
def host_syncs() -> Iterator[list[str]]:
    """Collect the project's calls in the block that would wait for a device, each with its line."""
    found: list[str] = []
    with _Copies(found), _Reads(found):
        yield found


def syncs_of_step(engine: Any, batches: list[Any]) -> list[str]:
    """Take steps on all batches but the last, and tell what would wait in a step on that one."""
    for batch in batches[:-1]:
        engine.train_step(batch)
    with host_syncs() as found:
        engine.train_step(batches[-1])
    return sorted(set(found))
