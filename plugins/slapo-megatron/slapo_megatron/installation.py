"""Find the installed Megatron-core without importing it, and check the device that it will use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from slapo_core import BuildError
from slapo_core.hookspecs import Fact, Problem

if TYPE_CHECKING:
    import torch

    from slapo_runtime.context import BuildContext


def window() -> SpecifierSet:
    """The versions of Megatron-core that this plugin is made for, as its own metadata says: ``>=0.16,<0.20``."""
    wanted = [Requirement(line) for line in requires("slapo-megatron") or ()]
    return next(one.specifier for one in wanted if one.name == "megatron-core")


def found_version() -> str | None:
    """The version that is installed; None where it is not."""
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return None


def require_megatron() -> None:
    """
    Raises:
        BuildError: Megatron-core is not installed, or in a version that this plugin was not made for.
    """
    found, wanted = found_version(), window()
    if found is None:
        raise BuildError(
            "target 'megatron' needs megatron-core, which is not installed", hint="pip install slapo-megatron"
        )
    if not wanted.contains(found, prereleases=True):
        raise BuildError(
            f"target 'megatron' runs megatron-core {wanted}, and {found} is installed",
            hint=f"pip install 'megatron-core{wanted}'",
        )


_NEEDED = {
    "psutil": "saving Megatron's own checkpoints waits without end",
    "einops": "some of Megatron's modules are not imported without",
}
_OPTIONAL = {
    "transformer_engine": ("transformer-engine", "its fused Adam steps"),
    "apex": ("apex", "its fused Adam steps"),
}


def examine() -> Iterator[Fact | Problem]:
    """Report Megatron-core and its undeclared requirements; fused optimizers, and a GPU."""
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


def require_device(context: BuildContext) -> None:
    """
    Args:
        context: of the build.

    Raises:
        BuildError: no CUDA device is available, or the model is on another one than Megatron takes.
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
    for live in context.state.tensors():
        if live.is_local and live.tensor.device != taken:
            raise BuildError(
                f"'{live.name}' is on '{live.tensor.device}', but Megatron takes '{taken}', the device that torch uses",
                hint=f'build(device="{taken}")',
            )
