"""examples/gpt_megatron.py: tensor-parallel stages, and replicas of stages, by Megatron-core against one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slapo_core.testing import preload_modules
from tests.integration.example_runs import assert_trains_as_one_process, example

pytestmark = pytest.mark.ranks
preload_modules("transformers.models.gpt2.modeling_gpt2", "slapo_tp", "slapo_pipeline.partition.hook")
preload_modules("tests.cpu_megatron", "slapo_megatron.pipeline.engine")


@pytest.mark.breadth
def test_megatron_trains_as_one_process_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed, shares = assert_trains_as_one_process("gpt_megatron", ["--quick"], tmp_path, capsys, world_size=4)
    assert "pipeline_split(2, balance='flops', after=('h.0',)) at 'transformer'" in printed
    # A rank holds a stage, or a half of each of its layers; of a stage's replicas, each has a half of the state.
    assert max(shares["pp2_tp2"]) < 0.4
    assert max(shares["dp2_pp2"]) < 0.45


@pytest.mark.parametrize(
    ("gpus", "said", "status"),
    [
        (0, "NO GPU IS HERE: Megatron-core runs on the CPU, by the stand-in for CUDA that the tests have", 0),
        (1, "the scheduled runs take 4 GPUs, and this machine has 1; on its CPU: CUDA_VISIBLE_DEVICES= python", 2),
        (4, "Megatron-core runs on 4 GPUs", 0),
    ],
)
def test_where_it_runs_is_said(
    gpus: int, said: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt_megatron = example("gpt_megatron")
    launched: list[Any] = []
    monkeypatch.setattr(gpt_megatron.torch, "cuda", _cuda(gpus))
    monkeypatch.setattr(gpt_megatron.common, "launch", lambda *arguments: launched.append(arguments) or 0)
    monkeypatch.setattr(gpt_megatron, "compare", lambda options: 0)
    assert gpt_megatron.main(gpt_megatron.parsed(["--quick"])) == status
    assert len(launched) == (0 if status else 1)
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def _cuda(gpus: int) -> Any:
    return SimpleNamespace(is_available=lambda: gpus > 0, device_count=lambda: gpus)
