"""Evaluating gives what the plain model gives, and leaves everything as it was."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from slapo_core.testing.bench import seeded
from slapo_core.testing.check import CheckError
from slapo_core.testing.dialects.bench import DialectBench
from slapo_core.testing.dialects.training import differences, evaluate_by_hand, train

__all__ = ["eval_step_changes_nothing", "eval_step_equals_the_plain_model"]

_HINT = "under torch.no_grad(): module.eval(), request.compute_loss(batch), and the mode of every module put back"


def eval_step_equals_the_plain_model(bench: DialectBench) -> None:
    """The loss, and the output if there is one, are those of the plain model in evaluation mode, without a graph."""
    (batch,) = bench.batches(1)
    loss, output = evaluate_by_hand(bench.model(), batch, bench.case.loss)
    engine = bench.engine(bench.schedule(steps=True))
    with seeded():
        result = engine.eval_step(batch)
    got = {"the loss": result.loss, **(_named(result.output) if result.output is not None else {})}
    expected = {"the loss": loss, **(_named(output) if result.output is not None else {})}
    lines = differences(expected, got, tolerance=bench.case.allowed)
    lines += [f"{name}: requires a gradient" for name, tensor in got.items() if tensor.requires_grad]
    if lines:
        raise CheckError(
            "eval_step() is not an evaluation of the plain model",
            required="its loss and output in evaluation mode, without gradients",
            got="\n".join(lines[:3]),
            hint=_HINT,
        )


def eval_step_changes_nothing(bench: DialectBench) -> None:
    """Every module keeps its mode, also after a wrong batch; no gradients are left, and training goes on as ever."""
    batches = bench.batches(3)
    engine = bench.engine(bench.schedule(steps=True))
    mixed = next(iter(engine.module.children()), engine.module)
    mixed.eval()
    modes = _modes(engine.module)
    engine.eval_step(batches[0])
    _require_modes(engine.module, modes, "eval_step()")
    with contextlib.suppress(Exception):  # whatever it is: the model need not mind
        engine.eval_step({"no_such_argument": 1})
    _require_modes(engine.module, modes, "eval_step() with a batch that the model does not take")
    left = [name for name, parameter in engine.module.named_parameters() if parameter.grad is not None]
    if left:
        raise CheckError(
            "eval_step() leaves gradients behind",
            required="no parameter has a gradient",
            got=", ".join(left[:5]),
            hint=_HINT,
        )
    mixed.train(modes[""])
    expected = bench.train_by_hand(batches)
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
            required="every module is in training or evaluation mode as before",
            got=f"another mode of {', '.join(changed[:5])}",
            hint="note the mode of every module, and put it back in a finally block",
        )
