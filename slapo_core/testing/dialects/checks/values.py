"""A model without values gets them, and given weights are used."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from slapo_core.errors import WeightsError
from slapo_core.spec.engine import Engine
from slapo_core.testing.bench import SEED
from slapo_core.testing.check import CheckError, NotApplicable
from slapo_core.testing.dialects.bench import DialectBench
from slapo_core.testing.dialects.training import differences

__all__ = ["meta_model_is_given_its_values", "weights_are_read"]

_HINT = "leave the values to build(); with takes_tensors = True: for tensor in request.materialize(): ..."


def meta_model_is_given_its_values(bench: DialectBench) -> None:
    """A model on the meta device has values when it is built: those of every target, others for another seed."""
    own = _build(bench, seed=3)
    empty = [name for name, tensor in _tensors(own) if tensor.is_meta]
    if empty:
        raise CheckError(
            "the engine holds tensors without values",
            required="no parameter or buffer on the meta device",
            got=", ".join(empty[:5]),
            hint=_HINT,
        )
    state = own.state_dict()
    lines = differences(_build(bench, seed=3, target="torch").state_dict(), state, tolerance=0)
    if lines:
        raise CheckError(
            "a model on the meta device gets other values than for target 'torch'",
            required="the same initial values under every target, for the same seed",
            got="\n".join(lines[:3]),
            hint=_HINT,
        )
    if not differences(state, _build(bench, seed=4).state_dict(), tolerance=0):
        raise CheckError(
            "another seed gives the same initial values",
            required="build(..., seed=4) initializes otherwise than seed=3",
            got="the same bits",
            hint=_HINT,
        )
    (batch,) = bench.batches(1)
    own.train_step(batch)
    if not differences(state, own.state_dict(), tolerance=0):
        raise CheckError(
            "a model that was on the meta device is not trained",
            required="a step changes its parameters",
            got="the same bits",
            hint="make the optimizer after the values are there: in build(), by request.make_optimizer()",
        )


def weights_are_read(bench: DialectBench) -> None:
    """weights= fills a model on the meta device from a file, and overwrites one with values from a mapping."""
    from safetensors.torch import save_file

    wanted = bench.model(seed=SEED + 99).state_dict()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.safetensors"
        save_file({name: tensor.clone().contiguous() for name, tensor in wanted.items()}, file)
        engines = {
            "from a file, on the meta device": _build(bench, weights=file),
            "from a mapping": bench.engine(bench.schedule(steps=True), weights=wanted),
        }
    for what, engine in engines.items():
        lines = differences(wanted, engine.state_dict(), tolerance=0)
        if lines:
            raise CheckError(
                f"weights= are not what the engine holds ({what})",
                required="the very bits that were given",
                got="\n".join(lines[:3]),
                hint=_HINT,
            )


def _build(bench: DialectBench, **options: Any) -> Engine:
    try:
        return bench.engine(bench.schedule(bench.meta_model(), steps=True), **options)
    except WeightsError as error:
        if options.get("target") or not _torch_refuses(bench, **options):
            raise
        raise NotApplicable(f"the case's model cannot be initialized on the meta device: {error.message}") from error


def _torch_refuses(bench: DialectBench, **options: Any) -> bool:
    """Whether the model, not the dialect, is the reason."""
    try:
        bench.engine(bench.schedule(bench.meta_model(), steps=True), **{**options, "target": "torch"})
    except WeightsError:
        return True
    return False


def _tensors(engine: Engine) -> list[tuple[str, Any]]:
    return [*engine.module.named_parameters(), *engine.module.named_buffers()]
