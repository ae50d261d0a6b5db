"""Training goes on from a checkpoint as if nothing had happened, under another schedule and for another target too."""

from __future__ import annotations

import tempfile

from slapo_core.spec.engine import Engine
from slapo_core.spec.request import OptimizerFactory
from slapo_core.testing.bench import SEED
from slapo_core.testing.dialects.bench import DialectBench
from slapo_core.testing.dialects.training import train

__all__ = ["checkpoint_is_read_by_other_targets", "checkpoint_resumes_exactly"]

_HINT = "request.state.save(directory, optimizer=optimizer) and request.state.load(directory, optimizer=optimizer)"


def checkpoint_resumes_exactly(bench: DialectBench) -> None:
    """Two steps, save, load into a fresh engine under another schedule, two more: as four steps of the plain model."""
    for optimizer in bench.case.optimizers:
        name = getattr(optimizer, "__name__", "the optimizer of the case")
        first = bench.engine(bench.schedule(steps=True), optimizer=optimizer)
        _hand_on(bench, first, _fresh(bench, optimizer=optimizer), optimizer, under=f"resumed with {name}")


def checkpoint_is_read_by_other_targets(bench: DialectBench) -> None:
    """Target "torch" goes on from a checkpoint of this dialect, and this dialect from one of "torch"."""
    optimizer = bench.case.optimizers[-1]
    own = bench.engine(bench.schedule(steps=True), optimizer=optimizer)
    _hand_on(bench, own, _fresh(bench, target="torch", optimizer=optimizer), optimizer, under="resumed by 'torch'")
    torchs = bench.engine(bench.schedule(steps=True), target="torch", optimizer=optimizer)
    _hand_on(bench, torchs, _fresh(bench, optimizer=optimizer), optimizer, under="resumed from a checkpoint of 'torch'")


def _fresh(bench: DialectBench, *, optimizer: OptimizerFactory, target: str | None = None) -> Engine:
    """Another model, other values, no steps."""
    return bench.engine(bench.schedule(bench.model(seed=SEED + 99)), optimizer=optimizer, target=target)


def _hand_on(bench: DialectBench, first: Engine, second: Engine, optimizer: OptimizerFactory, *, under: str) -> None:
    batches = bench.batches(4)
    expected = bench.train_by_hand(batches, optimizer=optimizer)
    train(first, batches[:2])
    with tempfile.TemporaryDirectory() as directory:
        first.save(directory)
        second.load(directory)
    got = train(second, batches[2:], first=2)
    names = ("the loss of the third step", "the loss of the fourth step")
    bench.require_same(
        {**dict(zip(names, expected.losses[2:], strict=True)), **expected.state},
        {**dict(zip(names, got.losses, strict=True)), **got.state},
        under=under,
        hint=_HINT,
    )
