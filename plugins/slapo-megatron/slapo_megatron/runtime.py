"""The installed Megatron-core: its version, its device, and its objects of one engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from slapo_core import BuildError
from slapo_core.hookspecs import Fact, Problem
from slapo_runtime.installed import Runtime

if TYPE_CHECKING:
    from slapo_runtime.context import BuildContext

MEGATRON = Runtime("megatron-core", "slapo-megatron", "megatron", tested="0.19")

_FUSED = {"transformer_engine": "transformer-engine", "apex": "apex"}


@dataclass
class Megatron:
    """Megatron's objects of an engine, as ``engine.megatron``.

    Args:
        chunks: the model, or this rank's stages, each in Megatron's DistributedDataParallel.
        optimizer: Megatron's; None if the engine only evaluates.
        scheduler: Megatron's ``OptimizerParamScheduler``; None if the user's factory made the optimizer.
        config: the ``TransformerConfig`` of the schedules.
    """

    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    config: Any


def examine() -> Iterator[Fact | Problem]:
    """Report Megatron-core's version, its Adam, and GPUs."""
    import torch

    yield from MEGATRON.facts()
    if sys.version_info < (3, 12):
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        yield Fact("Python", f"{python}: for megatron-core 0.16; 0.17 and newer need 3.12")
    fused = next((name for module, name in _FUSED.items() if find_spec(module) is not None), None)
    yield Fact("Adam of Megatron", f"{fused}'s, fused" if fused else "torch's")
    if torch.cuda.is_available():
        yield Fact("GPUs", str(torch.cuda.device_count()))
    else:
        yield Fact("GPUs", "none")
        yield Problem(
            "no GPU was found: Megatron allocates buffers on CUDA devices; plans work here, engines do not",
            'target="torch" runs the same schedule on CPUs',
        )


def require_device(context: BuildContext) -> None:
    """Require the model on Megatron's device.

    Args:
        context: of the build.

    Raises:
        BuildError: no CUDA device is available, or the model is on another one.
    """
    import torch
    from megatron.core import parallel_state

    try:
        found = parallel_state.torch.cuda.current_device()  # through the module that Megatron uses
    except (AssertionError, RuntimeError) as error:
        raise BuildError(
            f"Megatron allocates buffers on CUDA devices, and torch has none here: {str(error).splitlines()[0]}",
            hint='target="torch" runs the same schedule on CPUs',
        ) from error
    taken = torch.device("cuda", found) if isinstance(found, int) else found
    for live in context.state.tensors():
        if live.is_local and live.tensor.device != taken:
            raise BuildError(
                f"'{live.name}' is on '{live.tensor.device}', but Megatron uses '{taken}', torch's current device",
                hint=f'build(device="{taken}"), or torch.cuda.set_device() before',
            )
