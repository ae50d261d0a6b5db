"""Check that training and evaluation steps equal plain PyTorch."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import nn

from slapo_core.dialect import StepResult
from slapo_core.errors import BuildError
from slapo_testing.bench import seeded
from slapo_testing.check import CheckError, NotApplicable
from slapo_testing.dialects.bench import (
    DialectBench,
    differences,
    evaluate_in_plain_torch,
    refusal,
    require_equal,
    train,
)
from slapo_testing.dialects.case import BATCH_TYPES, EVALUATING, FROZEN, OUTSIDE_LOSS, PARTLY_EVALUATING, TIED, TRAINING
from slapo_testing.private import tree_leaves, tree_map_only

_STEP = "optimizer.zero_grad(), context.compute_loss(batch), backward(), context.clip_gradients(), optimizer.step()"


def step_result_is_complete(bench: DialectBench) -> None:
    """Steps return a StepResult: a detached scalar loss, and a grad_norm exactly with max_grad_norm."""
    (batch,) = bench.batches(1)
    for clipped in (False, True):
        engine = bench.engine(max_grad_norm=1.0 if clipped else None)
        for name, result in (("train_step", engine.train_step(batch)), ("eval_step", engine.eval_step(batch))):
            wanted = clipped and name == "train_step"
            wrong = _wrong(result, norm=wanted)
            if wrong is not None:
                raise CheckError(
                    f"the result of {name}() is incomplete",
                    required="StepResult: loss is a detached scalar tensor, grad_norm "
                    + ("too, with max_grad_norm" if wanted else "is None"),
                    got=wrong,
                    hint="StepResult(loss.detach(), output, context.clip_gradients())",
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
    """Losses and weights of three steps equal the plain model's, with each optimizer of the case."""
    for optimizer in bench.case.optimizers:
        name = getattr(optimizer, "__name__", "the optimizer of the case")
        bench.compare_with_plain_training(optimizer=optimizer, under=f"with {name}", hint=_STEP)


def scheduled_model_trains_the_same(bench: DialectBench) -> None:
    """With the case's steps applied, losses and weights equal the plain model's."""
    if bench.case.steps is None:
        raise NotApplicable("the case has no schedule= that applies steps to its model=")
    for optimizer in bench.case.optimizers:
        bench.compare_with_plain_training(
            steps=True,
            optimizer=optimizer,
            under="with the steps of the schedule",
            hint="run context.schedule.model unchanged, and let context.state translate its names",
        )


def tied_weights_stay_tied(bench: DialectBench) -> None:
    """A weight with two names is updated once and saved under both names."""
    bench.compare_with_plain_training(
        subject=TIED,
        under="with two layers that share a weight",
        hint="give the optimizer each parameter once, as context.make_optimizer() does; do not copy parameters",
    )


def frozen_parameters_stay(bench: DialectBench) -> None:
    """Parameters without requires_grad keep their values; all others are trained."""
    bench.compare_with_plain_training(
        subject=FROZEN,
        under="with frozen parameters",
        hint="do not change requires_grad, or gradients that are None",
    )


def clipping_is_that_of_plain_training(bench: DialectBench) -> None:
    """grad_norm is the norm of all gradients before clipping, and max_grad_norm their norm after it."""
    hint = "call context.clip_gradients() once, after all backward passes and before optimizer.step()"
    bench.compare_with_plain_training(max_grad_norm=1e6, under="with a max_grad_norm that is never reached", hint=hint)
    batches = bench.batches(3)
    norms = bench.train_in_plain_torch(batches, max_grad_norm=1e6).norms
    bench.compare_with_plain_training(
        steps=True,
        max_grad_norm=0.5 * min(map(float, norms)),
        under="with clipped gradients",
        hint=hint,
    )


_MODES = "call context.compute_loss(batch): it leaves evaluation mode unless modules were built in it"
_ACCUMULATE = (
    "for micro_batch in context.micro_batches(batch): backward of context.compute_loss(micro_batch)[0] / "
    "context.accumulate; "
    "then one step"
)


def evaluation_mode_is_left_for_training(bench: DialectBench) -> None:
    """A model in evaluation mode is trained in training mode; single modules in evaluation mode stay in it."""
    batches = bench.batches(3, TRAINING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the mode
        engine = bench.engine(subject=EVALUATING)
        got = train(engine, batches)
    expected = bench.train_in_plain_torch(batches, subject=TRAINING)
    bench.require_same(expected.named(), got.named(), under="for a model in evaluation mode", hint=_MODES)
    bench.compare_with_plain_training(subject=PARTLY_EVALUATING, under="with a module in evaluation mode", hint=_MODES)


def accumulation_equals_the_full_batch_or_is_refused(bench: DialectBench) -> None:
    """accumulate=2 takes the steps of the full batch in two forwards each; or it is a BuildError."""
    if not bench.dialect.accumulates:
        _require_refusal(lambda: bench.engine(accumulate=2), names="accumulate=2", what="building with accumulate=2")
        return
    batches = bench.batches(3)
    if any(len(leaf) % 2 for leaf in tree_leaves(batches) if isinstance(leaf, torch.Tensor) and leaf.dim()):
        raise NotApplicable("the samples of the case's batch are not divisible by two")
    schedule, calls = bench.schedule(steps=True), list[Any]()
    engine = bench.engine(schedule, accumulate=2, max_grad_norm=1e6)
    with schedule.model.register_forward_pre_hook(lambda *_: calls.append(None)):
        got = train(engine, batches)
    if len(calls) != 2 * len(batches):
        raise CheckError(
            f"{len(batches)} steps with accumulate=2 call the model {len(calls)} times",
            required="two calls in each step, one for each micro-batch",
            got=f"{len(calls)} calls of the model",
            hint=_ACCUMULATE,
        )
    expected = bench.train_in_plain_torch(batches, max_grad_norm=1e6, accumulate=2)
    bench.require_same(expected.named(), got.named(), under="with accumulate=2", hint=_ACCUMULATE)
    before = engine.state_dict()
    odd = tree_map_only(torch.Tensor, lambda leaf: leaf[1:] if leaf.dim() else leaf, batches[0])
    _require_refusal(
        lambda: engine.train_step(odd), names="accumulate=2", what="a batch that cannot be split into 2 micro-batches"
    )
    require_equal(
        before,
        engine.state_dict(),
        "train_step modifies the model although the batch cannot be split into 2 micro-batches",
        required="BuildError before any change",
        hint="call context.micro_batches(batch) first",
    )


def halving(optimizer: torch.optim.Optimizer) -> Any:
    """Halve the learning rate after each step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def learning_rate_is_scheduled_or_refused(bench: DialectBench) -> None:
    """lr_scheduler= steps after each step of the optimizer; or it is a BuildError."""
    try:
        engine = bench.engine(lr_scheduler=halving)
    except BuildError as error:
        if "lr_scheduler" not in str(error):
            raise
        return
    batches = bench.batches(3)
    expected = bench.train_in_plain_torch(batches, lr_scheduler=halving)
    bench.require_same(
        expected.named(),
        train(engine, batches).named(),
        under="with lr_scheduler=",
        hint="self.lr_scheduler = context.make_lr_scheduler(self.optimizer), and its step() after optimizer.step()",
    )


def _weight(batch: Any) -> float:
    """Return a weight that differs between micro-batches, as counts of tokens do."""
    first = next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    return 1.0 + float(first.double().abs().sum())


def loss_weights_count(bench: DialectBench) -> None:
    """loss_weight= weights the losses of the micro-batches of accumulate=2."""
    batches = bench.batches(3)
    if not bench.dialect.accumulates:
        raise NotApplicable("the dialect has no micro-batches")
    if any(len(leaf) % 2 for leaf in tree_leaves(batches) if isinstance(leaf, torch.Tensor) and leaf.dim()):
        raise NotApplicable("the samples of the case's batch are not divisible by two")
    engine = bench.engine(accumulate=2, loss_weight=_weight)
    expected = bench.train_in_plain_torch(batches, accumulate=2, loss_weight=_weight)
    bench.require_same(
        expected.named(),
        train(engine, batches).named(),
        under="with loss_weight= and accumulate=2",
        hint=_ACCUMULATE,
    )


def _require_refusal(call: Any, *, names: str, what: str) -> None:
    error = refusal(call, what)
    if names not in str(error):
        raise CheckError(
            f"the refusal of {what} does not name {names}",
            required=f"a BuildError that names {names}",
            got=str(error),
            hint=_ACCUMULATE,
        )


def batches_of_every_type(bench: DialectBench) -> None:
    """Mappings, tuples and single tensors become keyword, positional and single arguments of the model."""
    for kind, subject in BATCH_TYPES.items():
        bench.compare_with_plain_training(
            subject=subject,
            under=f"with batches that are {kind}",
            hint="call context.compute_loss(batch); torch.utils._pytree.tree_map handles all types",
        )


def labels_are_left_to_the_loss(bench: DialectBench) -> None:
    """With loss=, batch entries that the forward does not take go to the loss only."""
    bench.compare_with_plain_training(
        subject=OUTSIDE_LOSS,
        under="with loss= and labels that the model does not take",
        hint="call context.compute_loss(batch), which calls the model and the loss",
    )


_HINT = "under torch.no_grad(): module.eval(), context.compute_loss(batch), then restore the mode of each module"


def eval_step_equals_the_plain_model(bench: DialectBench) -> None:
    """Loss and output, if there is one, equal the plain model's in evaluation mode, without a graph."""
    (batch,) = bench.batches(1)
    loss, output = evaluate_in_plain_torch(bench.model(), batch, bench.case.loss)
    engine = bench.engine(bench.schedule(steps=True))
    with seeded():
        result = engine.eval_step(batch)
    got = {"the loss": result.loss, **(_named(result.output) if result.output is not None else {})}
    expected = {"the loss": loss, **(_named(output) if result.output is not None else {})}
    lines = differences(expected, got, tolerance=bench.case.allowed)
    lines += [f"{name}: requires a gradient" for name, tensor in got.items() if tensor.requires_grad]
    if lines:
        raise CheckError(
            "eval_step() differs from an evaluation of the plain model",
            required="its loss and output in evaluation mode, without gradients",
            got="\n".join(lines[:3]),
            hint=_HINT,
        )


def eval_step_changes_nothing(bench: DialectBench) -> None:
    """eval_step() keeps modes, also after a wrong batch, leaves no gradients, and does not affect training."""
    batches = bench.batches(3)
    engine = bench.engine(bench.schedule(steps=True))
    mixed = next(iter(engine.module.children()), engine.module)
    mixed.eval()
    modes = _modes(engine.module)
    engine.eval_step(batches[0])
    _require_modes(engine.module, modes, "eval_step()")
    with contextlib.suppress(Exception):  # any error, or none
        engine.eval_step({"no_such_argument": 1})
    _require_modes(engine.module, modes, "eval_step() with a batch that the model does not take")
    left = [name for name, parameter in engine.module.named_parameters() if parameter.grad is not None]
    if left:
        raise CheckError(
            "eval_step() leaves gradients",
            required="no parameter has a gradient",
            got=", ".join(left[:5]),
            hint=_HINT,
        )
    mixed.train(modes[""])
    expected = bench.train_in_plain_torch(batches)
    first = train(engine, batches[:1])
    engine.eval_step(batches[2])
    rest = train(engine, batches[1:], first=1)
    bench.require_same(
        {"the loss of the first step": expected.losses[0], **expected.state, "the last loss": expected.losses[-1]},
        {"the loss of the first step": first.losses[0], **rest.state, "the last loss": rest.losses[-1]},
        under="with an evaluation between the steps",
        hint=_HINT,
    )


def _named(output: Any) -> dict[str, torch.Tensor]:
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return {f"tensor {number} of the output": leaf for number, leaf in enumerate(leaves, start=1)}


def _modes(module: nn.Module) -> dict[str, bool]:
    return {path: child.training for path, child in module.named_modules()}


def _require_modes(module: nn.Module, modes: dict[str, bool], what: str) -> None:
    changed = [path or "the root" for path, training in _modes(module).items() if training != modes[path]]
    if changed:
        raise CheckError(
            f"{what} changes the mode of modules",
            required="the mode of each module stays",
            got=f"another mode of {', '.join(changed[:5])}",
            hint="restore the mode of each module in a finally block",
        )
