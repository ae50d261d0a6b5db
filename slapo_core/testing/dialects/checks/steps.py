"""A training step is the one that plain PyTorch takes."""

from __future__ import annotations

import torch

from slapo_core.spec.engine import StepResult
from slapo_core.testing.check import CheckError, NotApplicable
from slapo_core.testing.dialects.bench import DialectBench
from slapo_core.testing.dialects.models import FROZEN, TIED

__all__ = [
    "clipping_is_that_of_plain_training",
    "frozen_parameters_stay",
    "scheduled_model_trains_the_same",
    "step_result_is_complete",
    "tied_weights_stay_tied",
    "training_is_that_of_the_plain_model",
]

_STEP = "optimizer.zero_grad(), request.compute_loss(batch), backward(), request.clip_gradients(), optimizer.step()"


def step_result_is_complete(bench: DialectBench) -> None:
    """Steps give a StepResult: a detached scalar as loss, and a grad_norm exactly where max_grad_norm is given."""
    (batch,) = bench.batches(1)
    for clipped in (False, True):
        engine = bench.engine(max_grad_norm=1.0 if clipped else None)
        for name, result in (("train_step", engine.train_step(batch)), ("eval_step", engine.eval_step(batch))):
            wanted = clipped and name == "train_step"
            wrong = _wrong(result, norm=wanted)
            if wrong is not None:
                raise CheckError(
                    f"the result of {name}() is not complete",
                    required="StepResult: loss is a detached scalar tensor, grad_norm "
                    + ("too, because max_grad_norm is given" if wanted else "is None"),
                    got=wrong,
                    hint="StepResult(loss.detach(), output, request.clip_gradients())",
                )


def _wrong(result: StepResult, *, norm: bool) -> str | None:
    if not isinstance(result, StepResult):
        return repr(result)
    tensors = {"loss": result.loss, "grad_norm": result.grad_norm}
    if not norm:
        if result.grad_norm is not None:
            return f"grad_norm={result.grad_norm!r}"
        del tensors["grad_norm"]
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dim() or tensor.requires_grad:
            return f"{name}={tensor!r}"
    return None


def training_is_that_of_the_plain_model(bench: DialectBench) -> None:
    """Losses and weights of three steps are those of the plain model, with every optimizer of the case."""
    for optimizer in bench.case.optimizers:
        name = getattr(optimizer, "__name__", "the optimizer of the case")
        bench.compare_with_plain_training(optimizer=optimizer, under=f"with {name}", hint=_STEP)


def scheduled_model_trains_the_same(bench: DialectBench) -> None:
    """With the steps of the case applied, losses and weights are still those of the plain model."""
    if bench.case.steps is None:
        raise NotApplicable("the case has no schedule=, which applies steps to its model=")
    for optimizer in bench.case.optimizers:
        bench.compare_with_plain_training(
            steps=True,
            optimizer=optimizer,
            under="with the steps of the schedule",
            hint="run request.schedule.model as it is, and let request.state translate its names",
        )


def tied_weights_stay_tied(bench: DialectBench) -> None:
    """A weight with two names is one parameter: updated once, and saved under both."""
    bench.compare_with_plain_training(
        subject=TIED,
        under="with two layers that share a weight",
        hint="give the optimizer each parameter once, as request.make_optimizer() does; do not copy parameters",
    )


def frozen_parameters_stay(bench: DialectBench) -> None:
    """Parameters without requires_grad keep their values; all others are trained as ever."""
    bench.compare_with_plain_training(
        subject=FROZEN,
        under="with parameters that need no gradient",
        hint="leave requires_grad as it is, and gradients that are None alone",
    )


def clipping_is_that_of_plain_training(bench: DialectBench) -> None:
    """grad_norm is torch's norm of all gradients before clipping, and max_grad_norm is what is left of them."""
    hint = "call request.clip_gradients() once, when all gradients are there and before optimizer.step()"
    bench.compare_with_plain_training(max_grad_norm=1e6, under="with a max_grad_norm that is never reached", hint=hint)
    batches = bench.batches(3)
    norms = bench.train_by_hand(batches, max_grad_norm=1e6).norms
    bench.compare_with_plain_training(
        steps=True,
        max_grad_norm=0.5 * min(map(float, norms)),
        under="with gradients that are clipped",
        hint=hint,
    )
