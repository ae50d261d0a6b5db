"""Norms and clipping over tensor-parallel ranks equal the reference model's, because pieces are marked."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import slapo_deepspeed.engine
from slapo_testing import preload_modules, run_ranks
from tests.processor import Outcome, run_case

from . import small

preload_modules("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3")
pytestmark = pytest.mark.ranks

BF16 = {"bf16": {"enabled": True}}
FP32_SUMS = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
WAYS: list[tuple[dict[str, Any], int, bool]] = [
    ({}, 0, True),
    ({}, 1, True),
    ({}, 3, True),
    (BF16, 2, True),
    (FP32_SUMS, 1, False),
]
"""Precision and stage of ZeRO, and whether it is tried without marks too."""


def _run(precision: dict[str, Any], stage: int, *, marked: bool) -> tuple[list[float], list[float], float]:
    """Losses, norms, and how far the weights are from the reference model's."""
    keep = slapo_deepspeed.engine.mark
    if not marked:
        slapo_deepspeed.engine.mark = lambda context: []  # type: ignore[assignment]
    try:
        config = {**precision, "zero_optimization": {"stage": stage}}
        _, engine = small.built({"tp": 2}, config, max_grad_norm=small.CLIP)
    finally:
        slapo_deepspeed.engine.mark = keep
    results = [engine.train_step(small.batch(step)) for step in range(2)]
    state = engine.state_dict()
    engine.close()
    wanted = small.trained(2)[2]
    off = max(float((state[name].float() - one).abs().max()) for name, one in wanted.items())
    return [float(one.loss) for one in results], [float(one.grad_norm) for one in results], off


def _pair(precision: dict[str, Any], stage: int, both: bool) -> tuple[Any, Any]:
    return _run(precision, stage, marked=True), _run(precision, stage, marked=False) if both else None


def _on_ranks() -> list[Outcome[tuple[Any, Any]]]:
    torch.set_num_threads(1)
    return [run_case(way[0], _pair, *way) for way in WAYS]


@functools.cache
def _found() -> list[list[Outcome[tuple[Any, Any]]]]:
    return run_ranks(_on_ranks, world_size=2)


@pytest.mark.parametrize("number", range(len(WAYS)), ids=[f"{'-'.join(way[0])}-{way[1]}" for way in WAYS])
def test_the_norm_is_that_of_the_untouched_model_and_without_marks_it_is_not(number: int) -> None:
    losses, norms, _ = small.trained(2)
    is_low = bool(WAYS[number][0])
    for marked, unmarked in [rank[number].get() for rank in _found()]:
        assert marked[0] == pytest.approx(losses, rel=2e-2 if is_low else 1e-6)
        assert marked[1] == pytest.approx(norms, rel=5e-3 if is_low else 1e-6)
        assert marked[2] < (2e-2 if is_low else 1e-6)
        if unmarked is not None:
            assert unmarked[1][0] < 0.98 * norms[0]  # and nothing told
            assert is_low or unmarked[2] > 1e-5
