"""examples/bert_deepspeed.py: ZeRO-2 over replicas, and a pipeline, by DeepSpeed against one process without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_testing import preload_modules
from tests.integration.example_runs import assert_trains_as_one_process

pytestmark = pytest.mark.ranks
preload_modules("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "slapo_pipeline.partition.hook")
preload_modules("transformers.models.bert.modeling_bert", "slapo_deepspeed.pipeline")


@pytest.mark.breadth
def test_deepspeed_trains_as_one_process_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed, shares = assert_trains_as_one_process("bert_deepspeed", ["--quick"], tmp_path, capsys, world_size=2)
    assert "checkpoint() at 'bert.encoder.layer.{0,2,4}' (x 3)" in printed
    # Replicas hold halves of the optimizer's state, stages halves of everything.
    assert max(shares["zero2_dp2"]) < 0.75
    assert max(shares["pp2_zero1"]) < 0.65
