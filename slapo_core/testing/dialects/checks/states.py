"""What leaves an engine has the reference model's names, and so has what is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slapo_core.errors import WeightsError
from slapo_core.testing.bench import SEED
from slapo_core.testing.check import CheckError, NotApplicable
from slapo_core.testing.dialects.bench import DialectBench
from slapo_core.testing.dialects.training import differences, train, train_by_hand

__all__ = ["bad_state_dict_changes_nothing", "loaded_state_is_trained_on", "state_dict_is_the_untouched_models"]

_HINT = "return request.state.state_dict(rank0_only=rank0_only)"


def state_dict_is_the_untouched_models(bench: DialectBench) -> None:
    """Names, order, shapes and dtypes are the reference model's, the values copies of what plain training gives."""
    batches = bench.batches(3)
    expected = bench.train_by_hand(batches[:2]).state
    engine = bench.engine(bench.schedule(steps=True))
    got = train(engine, batches[:2]).state
    if list(got) != list(expected):
        raise CheckError(
            "the state dict has other names than the reference model's",
            required=", ".join(expected),
            got=", ".join(got),
            hint=_HINT,
        )
    bench.require_same(expected, got, under="in the state dict after two steps", hint=_HINT)
    bench.model().load_state_dict(got, strict=True)
    taken = {name: tensor.clone() for name, tensor in got.items()}
    engine.train_step(batches[2])
    if differences(taken, got, tolerance=0):
        raise CheckError(
            "a state dict changes when training goes on",
            required="copies",
            got=differences(taken, got, tolerance=0)[0],
            hint=_HINT,
        )
    whole, now = engine.state_dict(rank0_only=True), engine.state_dict()
    if list(whole) != list(now) or differences(now, whole, tolerance=0):
        raise CheckError(
            "state_dict(rank0_only=True) is another one on the first rank",
            required="the same as state_dict()",
            got=", ".join(whole) or "no tensors",
            hint=_HINT,
        )


def loaded_state_is_trained_on(bench: DialectBench) -> None:
    """After load_state_dict() the engine holds these values, and trains on from them."""
    batches = bench.batches(2)
    other = bench.model(seed=SEED + 99)
    engine = bench.engine(bench.schedule(steps=True))
    engine.load_state_dict(other.state_dict())
    lines = differences(other.state_dict(), engine.state_dict(), tolerance=0)
    if lines:
        raise CheckError(
            "load_state_dict() does not load what state_dict() gives",
            required="the same bits come back",
            got="\n".join(lines[:3]),
            hint="request.state.load_state_dict(state)",
        )
    optimizer, loss = bench.case.optimizers[0], bench.case.loss
    expected = train_by_hand(other, batches, optimizer, loss=loss)
    bench.require_same(
        expected.named(),
        train(engine, batches).named(),
        under="after load_state_dict()",
        hint="load into the parameters that the optimizer holds, as request.state.load_state_dict() does",
    )


def bad_state_dict_changes_nothing(bench: DialectBench) -> None:
    """Missing, unexpected or misshaped tensors are a WeightsError that names them, and nothing was loaded."""
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
                hint="request.state.load_state_dict(state)",
            ) from error
        lines = differences(before, engine.state_dict(), tolerance=0)
        if got or lines:
            raise CheckError(
                f"a state dict {what} is not refused as it must be",
                required=f"WeightsError that names '{named}', and no tensor changed",
                got=got or "\n".join(lines[:3]),
                hint="request.state.load_state_dict(state)",
            )


def _name_of_its_own(state: Mapping[str, torch.Tensor]) -> str:
    """The name of a tensor that has no other: one of two names of a tied weight may well be missing."""
    places = [tensor.data_ptr() for tensor in state.values()]
    names = [name for name, tensor in state.items() if tensor.dim() and places.count(tensor.data_ptr()) == 1]
    if not names:
        raise NotApplicable("every tensor of the model is a scalar or has two names")
    return names[-1]
