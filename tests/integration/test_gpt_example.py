"""examples/gpt_3d.py: a pipeline of tensor-parallel stages and one of replicas, small, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_core.testing import preload_modules
from tests.integration.example_runs import assert_trains_as_one_process

pytestmark = pytest.mark.ranks
preload_modules("transformers.models.gpt2.modeling_gpt2", "slapo_tp", "slapo_pipeline")

SMALL = ["--steps", "3", "--batch-size", "8", "--length", "16", "--vocab-size", "600", "--layers", "2"]


@pytest.mark.breadth
def test_four_processes_train_as_one_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed, shares = assert_trains_as_one_process("gpt_3d", SMALL, tmp_path, capsys, world_size=4)
    assert "pipeline_split(2, balance='flops', after=('h.0',)) at 'transformer'" in printed
    # A rank holds a stage, or a half of each of its layers: clearly less than the whole model.
    assert max(shares["dp2_pp2"]) < 0.65
    assert max(shares["pp2_tp2"]) < 0.4
