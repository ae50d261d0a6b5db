"""Runs of the small model that are saved in one form, and go on in another."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.integration.dialects.small import build, plain, train

__all__ = ["AFTER", "BEFORE", "CLOSE", "Pair", "differences", "saved_and_resumed"]

CLOSE = 2e-6  # of weights of size 1: what sums in another order make of float32 over four steps
BEFORE, AFTER = 2, 4

Pair = tuple[str, str]
"""The form that goes on, and the one that saved."""


def differences(engine: Any, steps: int) -> list[str]:
    """What of the state dict is not that of so many steps without interruption."""
    state, wanted = engine.state_dict(), plain(steps)
    assert list(state) == list(wanted)
    return [
        f"{name}: {(state[name] - value).abs().max():.2g}"
        for name, value in wanted.items()
        if state[name].dtype != value.dtype or not torch.allclose(state[name], value, rtol=0, atol=CLOSE)
    ]


def _save(form: str, directory: Path) -> list[str]:
    engine = build(form)
    train(engine, 0, BEFORE)
    engine.save(directory / form)
    found = differences(engine, BEFORE)
    engine.close()
    return found


def _resume(form: str, other: str, directory: Path) -> list[str]:
    """Load what ``other`` saved, into an engine with other values and no state yet, and go on."""
    engine = build(form, seed=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left unused, nothing is lacking
        engine.load(directory / other)
    found = differences(engine, BEFORE)
    train(engine, BEFORE, AFTER)
    engine.check_replicas()
    found += differences(engine, AFTER)
    engine.close()
    return found


def saved_and_resumed(saving: Sequence[str], pairs: Sequence[Pair], directory: Path) -> dict[str, list[str]]:
    """What differs, by what was done; on ranks, where the forms take several."""
    found = {form: _save(form, directory) for form in saving}
    found |= {f"{form} from {other}": _resume(form, other, directory) for form, other in pairs}
    return {what: differing for what, differing in found.items() if differing}
