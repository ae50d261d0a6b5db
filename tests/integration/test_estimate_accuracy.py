"""Predicted peaks are those that MemTracker counts on real tensors; a sample, `tools/estimate_accuracy.py` has all."""

from __future__ import annotations

import pytest

from slapo_runtime.launcher import run_process
from tests.support.estimate_cases import CASES, FAMILIES, Case
from tests.support.estimate_judge import compare
from tests.tiers import sampled

SAMPLE = [
    Case("gpt2", tp=8, dtype="bfloat16", mask="ones", accumulate=2, optimizer="SGD, momentum"),
    Case("bert", tp=2, checkpointed="some", mask="padded", attention="eager", batch=3, length=33),
    Case("llama", kv_heads=2, mask="padded", dtype="bfloat16", optimizer="AdamW, one by one", batch=1),
    Case("llama", tp=2, kv_heads=2, checkpointed="all", tied=False),
    Case("resnet", tp=2, batch=3, length=17, checkpointed="some", frozen=True),
    Case("t5", tp=4, mask="ones", checkpointed="some", optimizer="SGD"),
]


@pytest.mark.ranks
def test_predicted_peaks_are_those_of_real_tensors() -> None:
    sample = sampled(SAMPLE)
    found = run_process(compare, sample, timeout=600.0)
    off = {str(case): (memory.total, peak) for case, (memory, peak) in zip(sample, found, strict=True)}
    assert {case for case, (predicted, peak) in off.items() if predicted != peak} == set(), off
    assert {"forward", "backward", "optimizer"} <= {memory.phase for memory, _ in found}


def test_the_hundred_cases_cover_every_setting_in_every_family() -> None:
    assert len(set(CASES)) == 100
    for family in FAMILIES:
        own = [case for case in CASES if case.family == family]
        assert {case.tp for case in own} == {1, 2, 4, 8}
        assert {case.checkpointed for case in own} == {"none", "some", "all"}
        assert {case.dtype for case in own} == {"float32", "bfloat16"}
        assert len({case.optimizer for case in own}) == 4
