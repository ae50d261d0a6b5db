"""train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x replicas."""

from __future__ import annotations

from typing import Any

from slapo_core import BuildError
from slapo_deepspeed.config.draft import Draft

__all__ = ["fill_batch"]

_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def fill_batch(draft: Draft) -> None:
    """Fill in what is not given of the three.

    Raises:
        BuildError: a number that cannot be meant, or they contradict each other, ``accumulate``, or the replicas.
    """
    facts = draft.facts
    total, micro, steps = (_given(draft, key) for key in (_TOTAL, _MICRO, _STEPS))
    if facts.accumulate is not None and steps is not None and steps != facts.accumulate:
        raise BuildError(
            f"{draft.source.of(_STEPS)} is {steps}, but build(accumulate={facts.accumulate})",
            hint="say it once: they are the same number",
        )
    if steps is None:
        steps = _steps(draft, total, micro)
    if micro is None:
        micro = _micro(draft, total, steps)
    whole = micro * steps * facts.dp
    if total is not None and total != whole:
        raise BuildError(
            f"{draft.source.of(_TOTAL)} is {total}, but {_MICRO} {micro} x {_STEPS} {steps} x {facts.dp} replicas "
            f"(dp of the mesh {facts.mesh}) is {whole}",
            hint=f'"{_TOTAL}": {whole}, or leave one of the three out',
        )
    if total is None:
        draft.fill(_TOTAL, whole, f"{micro} x {steps} x {facts.dp} replicas")


def _steps(draft: Draft, total: int | None, micro: int | None) -> int:
    facts = draft.facts
    if facts.accumulate is not None:
        return int(draft.fill(_STEPS, facts.accumulate, f"accumulate={facts.accumulate}"))
    if total is not None and micro is not None:
        how = f"{_TOTAL} {total} / ({_MICRO} {micro} x {facts.dp} replicas)"
        return int(draft.fill(_STEPS, _whole(draft, total, micro * facts.dp, how), how))
    if facts.pp > 1:
        return int(draft.fill(_STEPS, facts.pp, f"one micro-batch for each of {facts.pp} ranks of the pipeline"))
    return int(draft.fill(_STEPS, 1, "nothing is accumulated"))


def _micro(draft: Draft, total: int | None, steps: int) -> int:
    facts = draft.facts
    if total is not None:
        how = f"{_TOTAL} {total} / ({_STEPS} {steps} x {facts.dp} replicas)"
        return int(draft.fill(_MICRO, _whole(draft, total, steps * facts.dp, how), how))
    if facts.samples is not None and facts.samples % steps == 0:
        how = f"{facts.samples} samples in the example inputs / {steps}"
        return int(draft.fill(_MICRO, facts.samples // steps, how))
    return int(draft.fill(_MICRO, 1, "DeepSpeed only counts samples with it"))


def _whole(draft: Draft, number: int, divisor: int, how: str) -> int:
    if number % divisor:
        raise BuildError(
            f"{draft.source.of(_TOTAL)} does not divide: {how} is {number / divisor:g}",
            hint=f"a multiple of {divisor}, e.g. {max(1, round(number / divisor)) * divisor}",
        )
    return number // divisor


def _given(draft: Draft, key: str) -> int | None:
    value: Any = draft.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise BuildError(f"{draft.source.of(key)} must be a positive whole number (got {value!r})", hint=f'"{key}": 1')
    return value
