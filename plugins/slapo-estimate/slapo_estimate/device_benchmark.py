"""Measure the numbers by which a step's time is predicted, on this machine."""

from __future__ import annotations

import platform
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from slapo_core.errors import ArgumentError
from slapo_core.layout import device_of
from slapo_estimate.device import DeviceSpec, Link
from slapo_runtime.float32 import float32_products
from slapo_runtime.launcher import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Types whose matrix products are measured; with float32 on CUDA also TF32."""

_REPEATS = 7
_SMALL = 256  # operations in a row


def measure_device(
    *,
    ranks: int = 1,
    dtypes: Sequence[str] = DTYPES,
    size: int | None = None,
    tell: Callable[[str], None] | None = None,
) -> DeviceSpec:
    """Measure the accelerator of this process; without one, its CPU with torch's threads.

    Args:
        ranks: processes on this machine between which links are measured (NCCL on GPUs, else gloo); 1 measures none.
        dtypes: names. Float32 is measured in full precision; ``"tf32"`` (float32 products rounded to TF32) is measured
            with float32 on CUDA, too.
        size: rows of the matrices; default: 4096 on an accelerator, 768 on a CPU.
        tell: called with the name of the next measurement.

    Raises:
        ArgumentError: ``ranks`` or a dtype is invalid.
    """
    if type(ranks) is not int or ranks < 1:
        raise ArgumentError(f"ranks must be at least 1 (got {ranks!r})", hint="ranks=2")
    unknown = [name for name in dtypes if name != "tf32" and not isinstance(getattr(torch, name, None), torch.dtype)]
    if unknown or not dtypes:
        raise ArgumentError(f"dtypes must be names of types, e.g. 'float32' (got {', '.join(unknown) or 'none'})")
    device, say = _device(), tell or (lambda text: None)
    rows = size if size is not None else 768 if device.type == "cpu" else 4096
    count = ranks if device.type == "cpu" else torch.accelerator.device_count()
    if ranks > count:
        raise ArgumentError(f"{ranks} ranks need {ranks} GPUs (got {count})", hint="ranks=1")
    flops = {}
    for name in products_of(dtypes):
        say(f"products in {name}")
        with float32_products(tf32=name == "tf32"):
            flops[name] = _products(device, torch.float32 if name == "tf32" else getattr(torch, name), rows)
    say("memory")
    bandwidth = _bandwidth(device)
    say("launches")
    launch = _launch(device)
    links = {}
    if ranks > 1:
        say(f"links of {ranks} ranks")
        links = {"*": _link(ranks, device)}
    return DeviceSpec(_name(device), flops, bandwidth, launch, _memory(device), links, device.type)


def products_of(dtypes: Sequence[str]) -> tuple[str, ...]:
    """Add TF32 to names of types with float32, on CUDA."""
    more = ("tf32",) if "float32" in dtypes and _device().type == "cuda" else ()
    return tuple(dict.fromkeys((*dtypes, *more)))


def _device() -> torch.device:
    kind = torch.accelerator.current_accelerator(check_available=True)
    return torch.device(kind.type, 0) if kind is not None else torch.device("cpu")


def _name(device: torch.device) -> str:
    if device.type != "cpu":
        name: str = torch.get_device_module(device).get_device_name(device)
        return name
    threads = torch.get_num_threads()
    return f"{platform.processor() or platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"


def _memory(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    total: int = torch.get_device_module(device).get_device_properties(device).total_memory
    return total


def _seconds(device: torch.device, function: Callable[[], object]) -> float:
    """Return the best of several runs after one warm-up (noise only slows runs down)."""
    found = []
    for _ in range(_REPEATS + 1):
        _synchronize(device)
        begin = time.perf_counter()
        function()
        _synchronize(device)
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _products(device: torch.device, dtype: torch.dtype, rows: int) -> float:
    """Measure FLOP/s of matrix products, on an accelerator over several products."""
    a, b = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
    out, times = torch.empty_like(a), 1 if device.type == "cpu" else 10

    def run() -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    return times * 2 * rows**3 / _seconds(device, run)


def _bandwidth(device: torch.device) -> float:
    a = torch.ones(2**24 if device.type == "cpu" else 2**28, device=device)  # larger than any cache
    b, c = torch.ones_like(a), torch.empty_like(a)
    return 3 * a.nbytes / _seconds(device, lambda: torch.add(a, b, out=c))


def _launch(device: torch.device) -> float:
    """Measure the seconds of a tiny operation, forward and backward."""
    a = torch.ones(16, device=device, requires_grad=True)

    def run() -> None:
        b = a
        for _ in range(_SMALL):
            b = b * 1.5
        b.sum().backward()

    return _seconds(device, run) / (2 * _SMALL)


def _link(ranks: int, device: torch.device) -> Link:
    """Measure bandwidth and latency of a ring by a small and a large all-reduce."""
    import torch.distributed as dist

    backend = dist.get_default_backend_for_device(device)
    elements = 2**22 if device.type == "cpu" else 2**28  # 1 GiB: over NVLink 16 MiB take hardly longer than one element
    few, many, size = run_ranks(_all_reduces, device.type, elements, world_size=ranks, backend=backend)[0]
    others = ranks - 1
    return Link(2 * others / ranks * size / max(many - few, 1e-9), few / (2 * others))


def _all_reduces(kind: str, elements: int) -> tuple[float, float, int]:
    device = device_of(kind)
    small, large = torch.ones(1, device=device), torch.ones(elements, device=device)

    def each(tensor: torch.Tensor, times: int) -> float:
        def run() -> None:
            for _ in range(times):
                dist.all_reduce(tensor)

        return _seconds(device, run) / times

    return each(small, 20), each(large, 1), large.nbytes
