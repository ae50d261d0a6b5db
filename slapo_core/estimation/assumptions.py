"""What an estimate takes for granted, in words."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Assumptions"]

_ALWAYS = (
    "operations are those of torch on the CPU: on another device a kernel may keep more or less for the backward pass "
    "(attention with dropout keeps its matrix)",
    "bytes are those of tensors, without what an allocator, cuBLAS or NCCL take beside them",
    "the output of a step is dropped before the next one",
    "what is compiled is estimated as it runs without: the compiler fuses, and keeps less",
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

    def train(self, model: nn.Module) -> None:
        """Put a model into training mode that is in evaluation mode as a whole, as a training step does."""
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            self._found["recurrent layers run step by step: fused kernels (MKL-DNN, cuDNN) keep other bytes"] = None
        if not any(module.training for module in model.modules()):
            model.train()
            self._found["the model, which is in evaluation mode as a whole, is put into training mode"] = None

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """It is going to make steps."""
        if any(
            "foreach" in group and group["foreach"] is None and not group.get("fused")
            for group in optimizer.param_groups
        ):
            self._found[
                "the optimiser takes parameters one by one, as on the CPU; on a GPU its default takes all at once, "
                "with temporaries of their size: optimizer=functools.partial(..., foreach=True) counts them"
            ] = None

    def optimizer_reads(self) -> None:
        """A number, such as the norm of an update."""
        self._found["numbers that the optimiser reads are taken to be 1"] = None
