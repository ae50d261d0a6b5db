"""examples/llama_3d.py: dp, pp and tp of two ranks each with kernels, checkpointing and sequence parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_testing import preload_modules
from tests.integration.example_runs import assert_trains_as_one_process

pytestmark = pytest.mark.ranks
preload_modules("transformers.models.llama.modeling_llama", "slapo_tp", "slapo_pipeline", "slapo_fusion", "deepspeed")
preload_modules("tests.support.cpu_megatron", "slapo_megatron.pipeline")


@pytest.mark.parametrize(
    "targets", [["torch"], pytest.param(["torch", "deepspeed", "megatron"], marks=pytest.mark.breadth)], ids=len
)
def test_eight_processes_train_as_one_does(
    targets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--quick", "--targets", *targets]
    printed, shares = assert_trains_as_one_process("llama_3d", arguments, tmp_path, capsys, world_size=8)
    for step in ("replace('fusion.sdpa'", "sync('fwd_post', op='reduce_scatter'", "checkpoint()", "pipeline_split(2"):
        assert step in printed, step
    # A rank holds a half of each layer of a stage; under the others, also a half of the optimizer's state of that.
    assert max(shares["torch"]) < 0.35
    assert all(max(share) < 0.25 for target, share in shares.items() if target != "torch"), shares
