"""Scheduled models that DeepSpeed trains against the reference ones: each way to run, with one of the families."""

from __future__ import annotations

import pytest

from slapo_testing import preload_modules
from tests.integration.deepspeed.cases import DeepSpeedCell, cells
from tests.integration.dialects.sampling import assert_clipping_shows, differing, sample
from tests.integration.dialects.subjects import MAX_GRAD_NORM, SUBJECTS

pytestmark = pytest.mark.ranks
preload_modules("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")  # the last one takes most of the time
preload_modules("slapo_deepspeed.pipeline")

LEFT_OUT = {("dp 2, tp 2", 3)}  # takes longest; ZeRO-3 runs on dp 2
SAMPLE = sample(cells, lambda cell: (cell.mesh, cell.zero) in LEFT_OUT)
"""The whole table is docs/results/deepspeed_matrix.md, by tools/deepspeed_matrix.py."""

UNCLIPPED = DeepSpeedCell("gpt2", "dp 2", zero=1, max_grad_norm=1.1 * MAX_GRAD_NORM)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.breadth)])
def test_deepspeed_trains_the_scheduled_model_as_torch_trains_the_reference_one(world_size: int) -> None:
    found = differing([*SAMPLE, UNCLIPPED], world_size)
    if world_size == 2:
        assert_clipping_shows(found.pop(str(UNCLIPPED)))
    assert {what: said[:5] for what, said in found.items() if said} == {}


def test_every_family_and_every_way_is_in_the_sample() -> None:
    assert {cell.family for cell in SAMPLE} == set(SUBJECTS)
    assert {(cell.mesh, cell.zero) for cell in SAMPLE} | LEFT_OUT == {(cell.mesh, cell.zero) for cell in cells("bert")}
