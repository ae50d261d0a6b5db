"""What tests of states do with an engine of any target, and how they say what they found."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import slapo_core as slapo
from tests.integration.dialects.small import build, train
from tests.support.checkpoints import stored

__all__ = ["before_the_first_step", "different", "low_precision", "said"]

_OURS = ("checkpoint", "replicas of", "main copy", "scheduler")


def different(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of what differs in type or in any bit."""
    assert list(one) == list(other)
    return [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]


def said(function: Any, *args: Any, **kwargs: Any) -> str:
    """The error that a call raises, or our warnings, or "fine"."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            function(*args, **kwargs)
        except slapo.SlapoError as error:
            return f"{type(error).__name__}: {error}"
    found = [str(one.message) for one in caught]
    return "\n".join(text for text in found if any(part in text for part in _OURS)) or "fine"


def low_precision(form: str, options: Mapping[str, Any], dtype: torch.dtype, directory: Path) -> dict[str, Any]:
    """Two steps, saved; two more, against those of an engine with other values that loaded it: bit for bit."""
    engine = build(form, dtype=dtype, **options)
    train(engine, 0, 2)
    engine.save(directory)
    before = engine.state_dict()
    train(engine, 2, 4)
    wanted = engine.state_dict()
    engine.close()
    closed = different(engine.state_dict(), wanted)
    other = build(form, dtype=dtype, seed=7, **options)
    train(other, 0, 1)
    other.load(directory)
    loaded = different(other.state_dict(), before)
    follows = said(other.check_replicas)
    train(other, 2, 4)
    resumed = different(other.state_dict(), wanted)
    other.close()
    kept = {str(value.dtype) for value in before.values()}
    rounded = all(torch.equal(value.bfloat16().to(value.dtype), value) for value in before.values())
    return {
        "types": kept,
        "rounded": rounded,
        "trained": {str(value.dtype) for value in stored(directory).values()},
        "differing": closed + loaded + resumed,
        "replicas": follows,
    }


def before_the_first_step(forms: Sequence[str], directory: Path) -> dict[str, list[str]]:
    """An engine that has no state yet: saved, and loaded into one that has."""
    found = {}
    for form in forms:
        fresh = build(form)
        fresh.save(directory / form)
        train(fresh, 0, 2)
        other = build(form, seed=7)
        train(other, 0, 1)
        other.load(directory / form)
        train(other, 0, 2)
        found[form] = different(other.state_dict(), fresh.state_dict())
        fresh.close()
        other.close()
    return found
