"""Scheduled models that Megatron trains against the reference ones: each way to run, with one of the families."""

from __future__ import annotations

import pytest

from slapo_testing import preload_modules
from tests.integration.dialects.same_file import file_cells
from tests.integration.dialects.sampling import assert_clipping_shows, differing, sample
from tests.integration.dialects.subjects import MAX_GRAD_NORM, SUBJECTS
from tests.integration.megatron.cases import MegatronCell, cells, sequence_cells

pytestmark = pytest.mark.ranks
preload_modules("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "slapo_deepspeed.pipeline")
preload_modules("tests.support.cpu_megatron", "slapo_megatron.engine")


def way(cell: MegatronCell) -> tuple[str, int, bool]:
    return cell.mesh, cell.virtual, cell.distributed


LEFT_OUT = {
    ("pp 2", 1, False),
    ("pp 2", 1, True),
    ("pp 2", 2, False),
    ("pp 2, tp 2", 1, False),  # the one file runs on this mesh
    ("pp 2, tp 2", 1, True),
    ("pp 2, dp 2", 1, False),
    ("pp 2, dp 2", 1, True),
    ("dp 2, tp 2", 1, True),
}
"""What takes longest; the small model of the plugin's own tests runs so."""

SAMPLE = sample(cells, lambda cell: way(cell) in LEFT_OUT)
"""The whole table is docs/results/megatron_matrix.md, by tools/megatron_matrix.py."""

UNCLIPPED = MegatronCell("gpt2", "dp 2", max_grad_norm=1.1 * MAX_GRAD_NORM)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.breadth), 4])
def test_megatron_trains_the_scheduled_model_as_torch_trains_the_reference_one(world_size: int) -> None:
    found = differing([*SAMPLE, UNCLIPPED, sequence_cells()[0], file_cells()[-1]], world_size)
    if world_size == 2:
        assert_clipping_shows(found.pop(str(UNCLIPPED)))
    assert {what: said[:5] for what, said in found.items() if said} == {}


def test_every_family_and_every_way_is_in_the_sample() -> None:
    assert {cell.family for cell in SAMPLE} == set(SUBJECTS)
    assert set(map(way, SAMPLE)) | LEFT_OUT == set(map(way, cells("bert")))
