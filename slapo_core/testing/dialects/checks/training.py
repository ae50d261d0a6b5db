"""A training step trains in training mode, and accumulates gradients where it is asked to."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from slapo_core.errors import BuildError
from slapo_core.testing.check import CheckError, NotApplicable
from slapo_core.testing.dialects.bench import DialectBench
from slapo_core.testing.dialects.models import EVALUATING, PARTLY_EVALUATING, TRAINING
from slapo_core.testing.dialects.training import differences, train

__all__ = ["accumulation_is_the_whole_batch_or_refused", "evaluation_mode_is_left_for_training"]

_MODES = "let request.compute_loss(batch) call the model: it leaves evaluation mode where that is no choice"
_ACCUMULATE = (
    "for piece in request.micro_batches(batch): backward of request.compute_loss(piece)[0] / request.accumulate; "
    "then one step"
)


def evaluation_mode_is_left_for_training(bench: DialectBench) -> None:
    """A model in evaluation mode as a whole is trained in training mode; modules that are so by choice stay so."""
    batches = bench.batches(3, TRAINING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that says so
        engine = bench.engine(subject=EVALUATING)
        got = train(engine, batches)
    expected = bench.train_by_hand(batches, subject=TRAINING)
    bench.require_same(expected.named(), got.named(), under="of a model that came in evaluation mode", hint=_MODES)
    bench.compare_with_plain_training(
        subject=PARTLY_EVALUATING, under="with a module in evaluation mode by choice", hint=_MODES
    )


def accumulation_is_the_whole_batch_or_refused(bench: DialectBench) -> None:
    """accumulate=2 takes the steps of the whole batch in two runs of the model each; or it is a BuildError."""
    if not bench.dialect.accumulates:
        _require_refusal(lambda: bench.engine(accumulate=2), names="accumulate=2", what="building with accumulate=2")
        return
    batches = bench.batches(3)
    if any(len(leaf) % 2 for leaf in tree_leaves(batches) if isinstance(leaf, torch.Tensor) and leaf.dim()):
        raise NotApplicable("the samples of the case's batch do not divide by two")
    schedule, calls = bench.schedule(steps=True), list[Any]()
    engine = bench.engine(schedule, accumulate=2, max_grad_norm=1e6)
    with schedule.model.register_forward_pre_hook(lambda *_: calls.append(None)):
        got = train(engine, batches)
    if len(calls) != 2 * len(batches):
        raise CheckError(
            f"{len(batches)} steps with accumulate=2 run the model {len(calls)} times",
            required="twice in each step, with half of the batch",
            got=f"{len(calls)} runs of the model",
            hint=_ACCUMULATE,
        )
    expected = bench.train_by_hand(batches, max_grad_norm=1e6, accumulate=2)
    bench.require_same(expected.named(), got.named(), under="with accumulate=2", hint=_ACCUMULATE)
    before = engine.state_dict()
    odd = tree_map_only(torch.Tensor, lambda leaf: leaf[1:] if leaf.dim() else leaf, batches[0])
    _require_refusal(lambda: engine.train_step(odd), names="accumulate=2", what="a batch that accumulate=2 cannot cut")
    lines = differences(before, engine.state_dict(), tolerance=0)
    if lines:
        raise CheckError(
            "a batch that accumulate=2 cannot cut changes the model",
            required="BuildError before anything is done",
            got="\n".join(lines[:3]),
            hint="call request.micro_batches(batch) first",
        )


def _require_refusal(call: Any, *, names: str, what: str) -> None:
    try:
        call()
    except BuildError as error:
        if names in str(error):
            return
        got = str(error)
    else:
        got = "no error"
    raise CheckError(
        f"{what} is not refused as it must be", required=f"a BuildError that names {names}", got=got, hint=_ACCUMULATE
    )
