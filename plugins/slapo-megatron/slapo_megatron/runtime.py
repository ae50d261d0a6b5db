"""The installed Megatron-core: its version, what else it needs, its device, and its objects of one engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from slapo_core import BuildError
from slapo_core.hookspecs import Fact, Problem
from slapo_runtime.installed import Runtime

if TYPE_CHECKING:
    import torch

    from slapo_runtime.context import BuildContext

MEGATRON = Runtime("megatron-core", "slapo-megatron", "megatron", tested="0.19")

_NEEDED = {
    "psutil": "saving Megatron's own checkpoints waits without end",
    "einops": "some of Megatron's modules cannot be imported without it",
}
_FUSED = {"transformer_engine": "transformer-engine", "apex": "apex"}


@dataclass
class Megatron:
    """``engine.megatron``: for everything else that users do with them.

    Args:
        chunks: the model, or this rank's stages of it, each in Megatron's DistributedDataParallel.
        optimizer: Megatron's; None where the engine only evaluates.
        scheduler: Megatron's ``OptimizerParamScheduler``; None where the user's factory made the optimizer.
        config: the ``TransformerConfig`` that the schedules read.
    """

    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    config: Any


def examine() -> Iterator[Fact | Problem]:
    """Report Megatron-core and its undeclared requirements; fused optimizers, and a GPU."""
    import torch

    yield from MEGATRON.facts()
    if sys.version_info < (3, 12):
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        yield Fact("Python", f"{python}: for megatron-core 0.16; 0.17 and newer need 3.12")
    for name, without in _NEEDED.items():
        yield Fact(name, _found(name) or "not installed")
        if _found(name) is None:
            yield Problem(f"{name} is not installed: {without}", f"pip install {name}")
    fused = [name for module, name in _FUSED.items() if find_spec(module) is not None]
    for name in _FUSED.values():
        yield Fact(name, (_found(name) or "found") if name in fused else "not installed")
    yield Fact("Adam of Megatron", f"{fused[0]}'s, fused" if fused else "torch's")
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
    """Check that a device is the one that Megatron takes.

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
    """Require that the model is on the device that Megatron takes.

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
