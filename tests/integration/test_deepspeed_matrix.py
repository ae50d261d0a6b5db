"""Scheduled models that DeepSpeed trains against the untouched ones: each way to run, with one of the families."""

from __future__ import annotations

import pytest

from slapo_core.testing import preload_modules, run_ranks
from tests.integration.deepspeed.cases import Cell, cells
from tests.integration.deepspeed.running import Run, run_cells
from tests.integration.deepspeed.same_file import file_cells
from tests.integration.deepspeed.subjects import MAX_GRAD_NORM, SUBJECTS

pytestmark = pytest.mark.ranks
preload_modules("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")  # the last one takes most of the time
preload_modules("slapo_tp", "slapo_pipeline.partition.hook", "slapo_fusion", "slapo_deepspeed.pipeline.engine")
preload_modules(*(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "t5")))

FAMILIES = ("bert", "gpt2", "llama", "t5")
LEFT_OUT = {("dp 2, tp 2", 3)}  # takes longest; ZeRO-3 runs on dp 2
SAMPLE: list[Run] = [
    ("untouched", ways[number % len(FAMILIES)])
    for number, ways in enumerate(zip(*(cells(family) for family in FAMILIES), strict=True))
    if (ways[0].mesh, ways[0].zero) not in LEFT_OUT
]
"""The whole table is docs/deepspeed_matrix.md, by tools/deepspeed_matrix.py."""

UNCLIPPED = Cell("gpt2", "dp 2", 1, max_grad_norm=1.1 * MAX_GRAD_NORM)


@pytest.mark.parametrize("world_size", [2, 4])
def test_deepspeed_trains_the_scheduled_model_as_torch_trains_the_untouched_one(world_size: int) -> None:
    runs = [run for run in [*SAMPLE, ("both targets", file_cells()[-1])] if run[1].world_size == world_size]
    control = [("untouched", UNCLIPPED)] if world_size == 2 else []
    ranks = run_ranks(run_cells, [*runs, *control], world_size=world_size, timeout=600)
    found = {
        f"{way}, {cell}": sorted({one for differing, _ in results for one in differing})
        for (way, cell), *results in zip([*runs, *control], *ranks, strict=True)
    }
    for way, cell in control:  # clipped to another norm: the losses, and every weight, must be found to differ
        said = found.pop(f"{way}, {cell}")
        assert any(one.startswith("the loss of step 2 is") for one in said), said
        assert sum("after training differs by" in one for one in said) > 50, said
        assert not any("step 0" in one for one in said), said  # before the first clipping they are the same
    assert {what: said[:5] for what, said in found.items() if said} == {}


def test_every_family_and_every_way_is_in_the_sample() -> None:
    assert {cell.family for _, cell in SAMPLE} == set(SUBJECTS)
    assert {(cell.mesh, cell.zero) for _, cell in SAMPLE} == {
        (cell.mesh, cell.zero) for cell in cells("bert")
    } - LEFT_OUT
