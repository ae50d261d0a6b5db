"""One pass through a model under fixed conditions: forward, or forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slapo_core.verification.determinism import fixed_conditions
from slapo_core.verification.dropout import DropoutMode
from slapo_core.verification.inputs import Batch, Inputs
from slapo_core.verification.leaves import output_leaves
from slapo_core.verification.precision import Choice

__all__ = ["Caller", "Conditions", "dense", "detached", "evaluated", "forward_backward", "strided"]


_PATTERN = 65_537  # elements of a cotangent, then repeated: a prime, so that no axis of a tensor falls in step with it


class Caller:
    """Calls a model, here in one piece.

    Args:
        model: a copy that nobody else runs.

    Attributes:
        modules: that may run, with their paths.
        paths: id of a module -> its path; more may come with a call.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: list[tuple[str, nn.Module]] = []
        self.paths: dict[int, str] = {}
        self.add(model)

    def add(self, model: nn.Module) -> None:
        """Count the modules of another copy in."""
        self.modules += model.named_modules()
        self.paths.update((id(module), path) for path, module in model.named_modules())

    def __call__(self, batch: Batch) -> Callable[[], Any]:
        """Make ready for a batch, outside of the fixed conditions; gives what runs the model under them."""
        return lambda: self.model(*batch.args, **batch.kwargs)


@dataclass(frozen=True)
class Conditions:
    """What two runs must have in common to be comparable.

    Args:
        dtype: the type that floating-point inputs are converted to; None leaves them.
        seed: of every random number generator, set before each forward.
        optimizer_steps: the number of updates.
        learning_rate: of the optimiser steps.
        adapt_output: makes of a rank's output the one that the untouched model gives.
        more_batches: further ones, each with what to call it, e.g. ``"a batch of 4"``.
        caller: makes of a model what calls it.
        choices: of the reference model in a finer type, which both models follow in their own.
    """

    dtype: torch.dtype | None
    seed: int
    optimizer_steps: int
    learning_rate: float = 0.0
    adapt_output: Callable[[Any], Any] = lambda output: output
    more_batches: tuple[tuple[str, Inputs], ...] = ()
    caller: Callable[[nn.Module], Caller] = Caller
    choices: tuple[Choice, ...] = ()


def evaluated(
    caller: Caller, inputs: Inputs, conditions: Conditions, dropout: DropoutMode | None = None
) -> dict[str, Any]:
    """The output of a model that is in evaluation mode."""
    run = caller(inputs.batch(conditions.dtype))
    with fixed_conditions(conditions.seed, dropout), torch.no_grad():
        output = conditions.adapt_output(run())
    return detached(output_leaves(output))


def forward_backward(
    caller: Caller, inputs: Inputs | Batch, conditions: Conditions, dropout: DropoutMode | None = None
) -> dict[str, Any]:
    """One forward, and backward from every floating-point leaf against a fixed random cotangent; the output."""
    run = caller(inputs if isinstance(inputs, Batch) else inputs.batch(conditions.dtype))
    dropout = dropout or DropoutMode()
    with fixed_conditions(conditions.seed, dropout):
        output = conditions.adapt_output(run())
        dropout.in_backward = True
        leaves = list(output_leaves(output))
        seen = detached(leaves)
        roots = [
            (position, leaf)
            for position, (_, leaf) in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if roots:
            cotangents = [_cotangent(leaf, position, conditions.seed) for position, leaf in roots]
            _backward(tuple(leaf for _, leaf in roots), tuple(cotangents))
    return seen


def _backward(roots: tuple[torch.Tensor, ...], cotangents: tuple[torch.Tensor, ...]) -> None:
    # The engine itself: torch.autograd.backward is a torch function, and within one no torch-function mode holds, so
    # that recomputed activations would be computed without the mode that switches dropout off.
    torch.autograd.Variable._execution_engine.run_backward(
        roots, cotangents, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _cotangent(leaf: torch.Tensor, position: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 7919 + position)  # on the CPU: the same on every device
    dtype = torch.complex128 if leaf.is_complex() else torch.float64
    pattern = torch.randn(min(leaf.numel(), _PATTERN), generator=generator, dtype=dtype)
    pattern = pattern.to(device=leaf.device, dtype=leaf.dtype)
    if leaf.numel() > _PATTERN:
        pattern = pattern.repeat(-(-leaf.numel() // _PATTERN))[: leaf.numel()]
    return pattern.view(leaf.shape)


def detached(items: Any) -> dict[str, Any]:
    """Copies of the tensors among named values."""
    return {name: dense(item) if isinstance(item, torch.Tensor) else item for name, item in items}


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is not sparse."""
    return strided(tensor.detach()).clone()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, unless it is sparse."""
    return tensor.to_dense() if tensor.is_sparse else tensor
