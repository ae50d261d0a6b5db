"""Check weights, state dicts and checkpoints of an engine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slapo_core.dialect import Engine
from slapo_core.errors import WeightsError
from slapo_runtime.context import OptimizerFactory
from slapo_testing.bench import SEED
from slapo_testing.check import CheckError, NotApplicable
from slapo_testing.dialects.bench import DialectBench, differences, require_equal, train, train_in_plain_torch

_MATERIALIZE_HINT = "leave the values to build(); with takes_tensors = True: for tensor in context.materialize(): ..."


def meta_model_is_given_its_values(bench: DialectBench) -> None:
    """build() initializes a model on the meta device as every target does, by its seed."""
    own = _build(bench, seed=3)
    empty = [name for name, tensor in _tensors(own) if tensor.is_meta]
    if empty:
        raise CheckError(
            "the engine has tensors without values",
            required="no parameter or buffer on the meta device",
            got=", ".join(empty[:5]),
            hint=_MATERIALIZE_HINT,
        )
    state = own.state_dict()
    require_equal(
        _build(bench, seed=3, target="torch").state_dict(),
        state,
        "a model on the meta device gets other values than for target 'torch'",
        required="equal initial values for all targets, for equal seeds",
        hint=_MATERIALIZE_HINT,
    )
    if not differences(state, _build(bench, seed=4).state_dict(), tolerance=0):
        raise CheckError(
            "another seed gives equal initial values",
            required="other values for build(..., seed=4) than for seed=3",
            got="the same bits",
            hint=_MATERIALIZE_HINT,
        )
    (batch,) = bench.batches(1)
    own.train_step(batch)
    if not differences(state, own.state_dict(), tolerance=0):
        raise CheckError(
            "parameters that were on the meta device do not change in training",
            required="a step changes the parameters",
            got="the same bits",
            hint="make the optimizer after initialization: in build(), by context.make_optimizer()",
        )


def weights_are_read(bench: DialectBench) -> None:
    """weights= loads a model on the meta device from a file, and any model from a mapping."""
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
        require_equal(
            wanted,
            engine.state_dict(),
            f"the engine does not have the values of weights= ({what})",
            required="the given bits",
            hint=_MATERIALIZE_HINT,
        )


def _build(bench: DialectBench, **options: Any) -> Engine:
    try:
        return bench.engine(bench.schedule(bench.meta_model(), steps=True), **options)
    except WeightsError as error:
        if options.get("target") or not _torch_refuses(bench, **options):
            raise
        raise NotApplicable(f"the case's model cannot be initialized on the meta device: {error.message}") from error


def _torch_refuses(bench: DialectBench, **options: Any) -> bool:
    """Return whether target "torch" refuses the model, too."""
    try:
        bench.engine(bench.schedule(bench.meta_model(), steps=True), **{**options, "target": "torch"})
    except WeightsError:
        return True
    return False


def _tensors(engine: Engine) -> list[tuple[str, Any]]:
    return [*engine.module.named_parameters(), *engine.module.named_buffers()]


_STATE_DICT_HINT = "return context.state.state_dict(rank0_only=rank0_only)"


def state_dict_is_the_reference_models(bench: DialectBench) -> None:
    """The state dict has the reference model's names, order, shapes, dtypes, and copies of trained values."""
    batches = bench.batches(3)
    expected = bench.train_in_plain_torch(batches[:2]).state
    engine = bench.engine(bench.schedule(steps=True))
    got = train(engine, batches[:2]).state
    if list(got) != list(expected):
        raise CheckError(
            "the names of the state dict differ from the reference model's",
            required=", ".join(expected),
            got=", ".join(got),
            hint=_STATE_DICT_HINT,
        )
    bench.require_same(expected, got, under="in the state dict after two steps", hint=_STATE_DICT_HINT)
    bench.model().load_state_dict(got, strict=True)
    taken = {name: tensor.clone() for name, tensor in got.items()}
    engine.train_step(batches[2])
    if differences(taken, got, tolerance=0):
        raise CheckError(
            "a state dict changes during further training",
            required="copies",
            got=differences(taken, got, tolerance=0)[0],
            hint=_STATE_DICT_HINT,
        )
    full, now = engine.state_dict(rank0_only=True), engine.state_dict()
    if list(full) != list(now) or differences(now, full, tolerance=0):
        raise CheckError(
            "state_dict(rank0_only=True) differs from state_dict() on the first rank",
            required="the result of state_dict()",
            got=", ".join(full) or "no tensors",
            hint=_STATE_DICT_HINT,
        )


def loaded_state_is_trained_on(bench: DialectBench) -> None:
    """After load_state_dict() the engine has these values and trains from them."""
    batches = bench.batches(2)
    other = bench.model(seed=SEED + 99)
    engine = bench.engine(bench.schedule(steps=True))
    engine.load_state_dict(other.state_dict())
    require_equal(
        other.state_dict(),
        engine.state_dict(),
        "state_dict() differs from the state dict of load_state_dict()",
        required="equal bits",
        hint="context.state.load_state_dict(state)",
    )
    optimizer, loss = bench.case.optimizers[0], bench.case.loss
    expected = train_in_plain_torch(other, batches, optimizer, loss=loss)
    bench.require_same(
        expected.named(),
        train(engine, batches).named(),
        under="after load_state_dict()",
        hint="load into the optimizer's parameters, as context.state.load_state_dict() does",
    )


def bad_state_dict_changes_nothing(bench: DialectBench) -> None:
    """Missing, unexpected or misshaped tensors are a WeightsError that names them; nothing is loaded."""
    engine = bench.engine(bench.schedule(steps=True))
    good = bench.model(seed=SEED + 99).state_dict()
    name = _name_of_its_own(good)
    before = engine.state_dict()
    bad: dict[str, tuple[str, Mapping[str, torch.Tensor]]] = {
        "without a tensor": (name, {key: tensor for key, tensor in good.items() if key != name}),
        "with a tensor of another name": ("no_such_tensor", {**good, "no_such_tensor": torch.ones(1)}),
        "with a tensor of another shape": (name, {**good, name: good[name].flatten()[:-1]}),
    }
    for what, (named, state) in bad.items():
        got = "it was loaded"
        try:
            engine.load_state_dict(state)
        except WeightsError as error:
            got = "" if named in str(error) else f"a WeightsError that does not name '{named}': {error}"
        except Exception as error:
            raise CheckError(
                f"a state dict {what} is refused by another error",
                required=f"WeightsError that names '{named}'",
                got=f"{type(error).__name__}: {error}",
                hint="context.state.load_state_dict(state)",
            ) from error
        lines = differences(before, engine.state_dict(), tolerance=0)
        if got or lines:
            raise CheckError(
                f"a state dict {what} is not refused correctly",
                required=f"WeightsError that names '{named}', without changed tensors",
                got=got or "\n".join(lines[:3]),
                hint="context.state.load_state_dict(state)",
            )


def _name_of_its_own(state: Mapping[str, torch.Tensor]) -> str:
    """Return the name of an untied tensor: a tied weight may lack one of its names."""
    places = [tensor.data_ptr() for tensor in state.values()]
    names = [name for name, tensor in state.items() if tensor.dim() and places.count(tensor.data_ptr()) == 1]
    if not names:
        raise NotApplicable("every tensor of the model is a scalar or has two names")
    return names[-1]


_CHECKPOINT_HINT = (
    "context.state.save(directory, optimizer=optimizer) and context.state.load(directory, optimizer=optimizer)"
)


def checkpoint_resumes_exactly(bench: DialectBench) -> None:
    """Two steps, save, load into another engine and schedule, and two steps equal four plain steps."""
    for optimizer in bench.case.optimizers:
        name = getattr(optimizer, "__name__", "the optimizer of the case")
        first = bench.engine(bench.schedule(steps=True), optimizer=optimizer)
        _hand_on(bench, first, _fresh(bench, optimizer=optimizer), optimizer, under=f"resumed with {name}")


def checkpoint_is_read_by_other_targets(bench: DialectBench) -> None:
    """Target "torch" resumes from a checkpoint of this dialect, and this dialect from one of "torch"."""
    optimizer = bench.case.optimizers[-1]
    own = bench.engine(bench.schedule(steps=True), optimizer=optimizer)
    _hand_on(bench, own, _fresh(bench, target="torch", optimizer=optimizer), optimizer, under="resumed by 'torch'")
    torchs = bench.engine(bench.schedule(steps=True), target="torch", optimizer=optimizer)
    _hand_on(bench, torchs, _fresh(bench, optimizer=optimizer), optimizer, under="resumed from a checkpoint of 'torch'")


def _fresh(bench: DialectBench, *, optimizer: OptimizerFactory, target: str | None = None) -> Engine:
    """Build an engine of a model with other values, without steps."""
    return bench.engine(bench.schedule(bench.model(seed=SEED + 99)), optimizer=optimizer, target=target)


def _hand_on(bench: DialectBench, first: Engine, second: Engine, optimizer: OptimizerFactory, *, under: str) -> None:
    batches = bench.batches(4)
    expected = bench.train_in_plain_torch(batches, optimizer=optimizer)
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
        hint=_CHECKPOINT_HINT,
    )
