"""What an estimate takes for granted, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from slapo_core.spec.device import DeviceSpec

__all__ = ["Assumptions"]

_ALWAYS = (
    "operations are those of torch on the CPU: on another device a kernel may keep more or less for the backward pass "
    "(attention with dropout keeps its matrix)",
    "bytes are those of tensors, without what an allocator, cuBLAS or NCCL take beside them",
    "the output of a step is dropped before the next one",
)


class Assumptions:
    """Gathers them while a rank is played."""

    def __init__(self) -> None:
        self._found = dict.fromkeys(_ALWAYS)

    def found(self) -> tuple[str, ...]:
        """In the order in which they were made, each once."""
        return tuple(self._found)

    def integers_are_one(self) -> None:
        """The batch is on the meta device."""
        self._found["integers of the batch, which has no values, are taken to be 1: masks mask nothing"] = None

    def seconds(self, device: DeviceSpec) -> None:
        """The time is predicted."""
        self._found[
            f"an operation takes as long as its products at the peak of {device.name}, or its bytes at its bandwidth, "
            "and a launch; a collective as long as a ring does, and nothing else is on its links"
        ] = None

    def replicas(self) -> None:
        """There are some."""
        self._found[
            "replicas exchange gradients as DistributedDataParallel does: in buckets of 25 MiB that stay, beside the "
            "backward pass"
        ] = None

    def pipeline(self, mesh: Mapping[str, int], *, timed: bool) -> None:
        """There are stages."""
        if mesh.get("dp", 1) > 1:
            self._found["replicas exchange gradients after the pipeline's schedule, in buckets"] = None
        if timed:
            self._found[
                "a rank of a pipeline waits for one turn of each other rank while the pipeline fills and drains; its "
                "messages are on their way while nothing else is computed"
            ] = None

    def without_gradients(self, names: Sequence[str]) -> None:
        """Of parameters that replicas have."""
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self._found[
                f"'{names[0]}'{others} gets no gradient: on replicas torch refuses the second step, unless build is "
                "given find_unused_parameters=True, which sends zeros in its place"
            ] = None

    def train(self, model: nn.Module) -> None:
        """Put a model into training mode that is in evaluation mode as a whole, as a training step does."""
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            self._found["recurrent layers run step by step: fused kernels (MKL-DNN, cuDNN) keep other bytes"] = None
        if not any(module.training for module in model.modules()):
            model.train()
            self._found["the model, which is in evaluation mode as a whole, is put into training mode"] = None

    @contextmanager
    def uncompiled(self, model: nn.Module) -> Iterator[None]:
        """While it lasts, what is compiled runs as it is written."""
        compiled = any(
            module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule)
            for module in model.modules()
        )
        if compiled:
            self._found["what is compiled is estimated as it runs without: the compiler fuses, and keeps less"] = None
        with torch.compiler.set_stance("force_eager"):
            yield
