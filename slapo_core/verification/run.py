"""Run a model under fixed conditions and keep every number that is compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slapo_core.verification.determinism import fixed_conditions
from slapo_core.verification.dropout import DropoutMode
from slapo_core.verification.inputs import Batch, Inputs
from slapo_core.verification.leaves import output_leaves

__all__ = ["EARLY", "KINDS", "STAGES", "STAGE_OF_KIND", "Conditions", "Observation", "run_stages", "step_size"]

STAGE_OF_KIND = {
    "output": "training",
    "buffer": "training",
    "gradient": "training",
    "dropout": "training",
    "evaluation output": "evaluation",
    "evaluation dropout": "evaluation",
    "evaluation buffer": "evaluation",
    "batch output": "batches",
    "batch gradient": "batches",
    "input gradient": "inputs",
    "parameter": "updates",
    "updated output": "updates",
    "updated buffer": "updates",
    "recomputed dropout": "dropout",
    "output with dropout": "dropout",
    "gradient with dropout": "dropout",
}
"""What is compared, in the order in which a difference is looked for, and the stage that it comes from."""

KINDS = tuple(STAGE_OF_KIND)

STAGES = tuple(dict.fromkeys(STAGE_OF_KIND.values()))
"""In the order in which they are run, each on a fresh copy; but evaluation goes on with the one that training left."""

EARLY = STAGES[:2]
"""The stages that every model can run; on one copy."""

MOMENTUM = 0.9


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
    """

    dtype: torch.dtype | None
    seed: int
    optimizer_steps: int
    learning_rate: float = 0.0
    adapt_output: Callable[[Any], Any] = lambda output: output
    more_batches: tuple[tuple[str, Inputs], ...] = ()


@dataclass
class Observation:
    """Everything seen in a run: kind -> name -> value. None stands for "no gradient"."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def of(self, kind: str) -> dict[str, Any]:
        return self.values.get(kind, {})


def run_stages(model: nn.Module, inputs: Inputs, conditions: Conditions, stages: Sequence[str]) -> Observation:
    """Run ``stages`` on ``model``, which is changed by it: a copy that nobody else uses.

    Args:
        model: the copy; submodules that are in evaluation mode within a model in training mode stay so.
        inputs: one batch, copied anew for every forward.
        conditions: the same for both models.
        stages: of :data:`STAGES`, in their order.
    """
    modes = _training_modes(model)
    model.zero_grad(set_to_none=True)
    seen = Observation()
    for stage in stages:
        _set_modes(modes, training=True)
        _STAGE_FUNCTIONS[stage](model, inputs, conditions, seen)
    return seen


def step_size(model: nn.Module, seen: Observation) -> float:
    """A learning rate whose first step moves the weights by about one percent; 0 if there is nothing to follow."""
    gradients = [grad for grad in seen.of("gradient").values() if grad is not None]
    length = math.sqrt(sum(float(grad.abs().double().square().sum()) for grad in gradients))
    weights = math.sqrt(sum(float(p.detach().abs().double().square().sum()) for p in model.parameters()))
    rate = 0.01 * (weights or 1.0) / length if length else 0.0
    return rate if math.isfinite(rate) else 0.0


def _training_modes(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    kept = model.training  # a model that is in evaluation mode as a whole has no training mode of its own to keep
    return [(module, module.training or not kept) for module in model.modules()]


def _set_modes(modes: list[tuple[nn.Module, bool]], *, training: bool) -> None:
    for module, trains in modes:
        module.training = trains and training


def _training(model: nn.Module, inputs: Inputs, conditions: Conditions, seen: Observation) -> None:
    dropout = DropoutMode(_paths(model))
    seen.values["output"] = _forward_backward(model, inputs, conditions, dropout)
    # After backward: recomputed activations may update buffers a second time.
    seen.values["buffer"] = _detached(model.named_buffers(remove_duplicate=False))
    seen.values["gradient"] = _gradients(model)
    seen.values["dropout"] = {"forward": dropout.draws}


def _evaluation(model: nn.Module, inputs: Inputs, conditions: Conditions, seen: Observation) -> None:
    dropout = DropoutMode(_paths(model))
    seen.values["evaluation output"] = _evaluated(model, inputs, conditions, dropout)
    seen.values["evaluation buffer"] = _detached(model.named_buffers(remove_duplicate=False))
    seen.values["evaluation dropout"] = {"forward": dropout.draws}


def _batches(model: nn.Module, inputs: Inputs, conditions: Conditions, seen: Observation) -> None:
    outputs: dict[str, Any] = {}
    for called, batch in conditions.more_batches:
        ran = _forward_backward(model, batch, conditions)
        outputs.update({f"{name} for {called}": value for name, value in ran.items()})
    seen.values["batch output"] = outputs
    seen.values["batch gradient"] = _gradients(model)


def _input_gradients(model: nn.Module, inputs: Inputs, conditions: Conditions, seen: Observation) -> None:
    batch = inputs.batch(conditions.dtype, watch=True)
    _forward_backward(model, batch, conditions)
    model.zero_grad(set_to_none=True)
    seen.values["input gradient"] = {
        name: None if tensor.grad is None else _dense(tensor.grad) for name, tensor in batch.watched.items()
    }


def _updates(model: nn.Module, inputs: Inputs, conditions: Conditions, seen: Observation) -> None:
    modes = [(module, module.training) for module in model.modules()]
    _evaluated(model, inputs, conditions)  # whoever keeps anything of it is behind the steps
    _set_modes(modes, training=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=conditions.learning_rate, momentum=MOMENTUM)
    for _ in range(conditions.optimizer_steps):
        optimizer.zero_grad(set_to_none=True)
        _forward_backward(model, inputs, conditions)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seen.values["parameter"] = _detached(model.named_parameters(remove_duplicate=False))
    seen.values["updated output"] = _evaluated(model, inputs, conditions)
    seen.values["updated buffer"] = _detached(model.named_buffers(remove_duplicate=False))


def _with_dropout(model: nn.Module, inputs: Inputs, conditions: Conditions, seen: Observation) -> None:
    dropout = DropoutMode(_paths(model), is_on=True)
    seen.values["output with dropout"] = _forward_backward(model, inputs, conditions, dropout)
    drawn = set(dropout.draws)
    seen.values["recomputed dropout"] = {draw.path: draw for draw in dropout.recomputed if draw not in drawn}
    seen.values["gradient with dropout"] = _gradients(model)


_STAGE_FUNCTIONS: dict[str, Callable[[nn.Module, Inputs, Conditions, Observation], None]] = {
    "training": _training,
    "evaluation": _evaluation,
    "batches": _batches,
    "inputs": _input_gradients,
    "updates": _updates,
    "dropout": _with_dropout,
}


def _evaluated(
    model: nn.Module, inputs: Inputs, conditions: Conditions, dropout: DropoutMode | None = None
) -> dict[str, Any]:
    """The output in evaluation mode, in which the model is left."""
    for module in model.modules():
        module.training = False
    batch = inputs.batch(conditions.dtype)
    with fixed_conditions(conditions.seed, dropout), torch.no_grad():
        output = conditions.adapt_output(model(*batch.args, **batch.kwargs))
    return _detached(output_leaves(output))


def _forward_backward(
    model: nn.Module,
    inputs: Inputs | Batch,
    conditions: Conditions,
    dropout: DropoutMode | None = None,
) -> dict[str, Any]:
    """One forward, and backward from every floating-point leaf against a fixed random cotangent."""
    batch = inputs if isinstance(inputs, Batch) else inputs.batch(conditions.dtype)
    dropout = dropout or DropoutMode()
    with fixed_conditions(conditions.seed, dropout):
        output = conditions.adapt_output(model(*batch.args, **batch.kwargs))
        dropout.in_backward = True
        leaves = list(output_leaves(output))
        seen = _detached(leaves)
        roots = [
            (position, leaf)
            for position, (_, leaf) in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if roots:
            cotangents = [_cotangent(leaf, position, conditions.seed) for position, leaf in roots]
            _backward(tuple(leaf for _, leaf in roots), tuple(cotangents))
    return seen


def _gradients(model: nn.Module) -> dict[str, Any]:
    """Those of all parameters, which are taken away from them."""
    found = {
        name: None if parameter.grad is None else _dense(parameter.grad)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    model.zero_grad(set_to_none=True)
    return found


def _paths(model: nn.Module) -> dict[int, str]:
    return {id(module): path for path, module in model.named_modules()}


def _backward(roots: tuple[torch.Tensor, ...], cotangents: tuple[torch.Tensor, ...]) -> None:
    # The engine itself: torch.autograd.backward is a torch function, and within one no torch-function mode holds, so
    # that recomputed activations would be computed without the mode that switches dropout off.
    torch.autograd.Variable._execution_engine.run_backward(
        roots, cotangents, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _cotangent(leaf: torch.Tensor, position: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 7919 + position)  # on the CPU: the same on every device
    dtype = torch.complex128 if leaf.is_complex() else torch.float64
    return torch.randn(leaf.shape, generator=generator, dtype=dtype).to(device=leaf.device, dtype=leaf.dtype)


def _detached(items: Any) -> dict[str, Any]:
    return {name: _dense(item) if isinstance(item, torch.Tensor) else item for name, item in items}


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_dense().clone() if tensor.is_sparse else tensor.clone()
