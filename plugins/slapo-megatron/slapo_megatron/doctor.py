"""What ``slapo doctor --ask slapo-megatron`` says. Megatron is not imported for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from slapo_core.spec.hookspecs import Fact, Problem
from slapo_megatron.installed import found_version, window

__all__ = ["examine"]

_NEEDED = {
    "psutil": "saving Megatron's own checkpoints waits without end",
    "einops": "some of Megatron's modules are not imported without",
}
_OPTIONAL = {
    "transformer_engine": ("transformer-engine", "its fused Adam steps"),
    "apex": ("apex", "its fused Adam steps"),
}


def examine() -> Iterator[Fact | Problem]:
    """Versions of Megatron-core and of what it does not say that it needs; fused optimizers, and a GPU."""
    yield from _version()
    for name, without in _NEEDED.items():
        yield Fact(name, _found(name) or "not installed")
        if _found(name) is None:
            yield Problem(f"{name} is not installed: {without}", f"pip install {name}")
    fused = [module for module in _OPTIONAL if find_spec(module) is not None]
    for module, (name, _) in _OPTIONAL.items():
        there = (_found(name) or "found") if module in fused else "not installed"
        yield Fact(name, there)
    yield Fact("Adam of Megatron", f"{_OPTIONAL[fused[0]][0]}'s, fused" if fused else "torch's")
    yield from _device()


def _version() -> Iterator[Fact | Problem]:
    found, wanted = found_version(), window()
    yield Fact("megatron-core", found or "not installed")
    if sys.version_info < (3, 12):
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        yield Fact("Python", f"{python}: for megatron-core 0.16; 0.17 and newer need 3.12")
    if found is None:
        yield Problem("megatron-core is not installed", "pip install slapo-megatron")
    elif not wanted.contains(found, prereleases=True):
        yield Problem(
            f"this plugin runs megatron-core {wanted}; installed is {found}", f"pip install 'megatron-core{wanted}'"
        )


def _device() -> Iterator[Fact | Problem]:
    import torch

    if torch.cuda.is_available():
        yield Fact("GPUs", str(torch.cuda.device_count()))
    else:
        yield Fact("GPUs", "none")
        yield Problem(
            "no GPU was found: Megatron puts its buffers on CUDA devices; plans can be made here, engines cannot",
            'target="torch" runs the same schedule on CPUs',
        )


def _found(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
