"""What `auto` adds to tensor parallelism: kernels that pay, stages, checkpoints; each with its reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
import slapo_models
from slapo_core.errors import ArgumentError, FitError
from slapo_estimate.device import DEVICES
from slapo_estimate.reduced_model import BlockKinds
from slapo_models.auto.kernels import CPU, paying_kernels

WIDTH, HEADS = 32, 4


class Block(nn.Module):
    """Attention in plain operators."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) * 0.35, dim=-1)
        x = x + self.out(torch.matmul(weights, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(50, WIDTH), nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch() -> torch.Tensor:
    return torch.randint(50, (2, 128), generator=torch.Generator().manual_seed(0))


def names(sch: slapo.Schedule) -> list[str]:
    return [record.primitive.name for record in sch.records]


@pytest.mark.ranks
@pytest.mark.breadth
@pytest.mark.parametrize("device", [DEVICES["a100"], CPU], ids=["a100", "cpu"])
def test_a_kernel_is_chosen_where_the_estimated_step_gains(device: Any) -> None:
    """Attention keeps no scores; regions that only a GPU runs as one kernel are left on a CPU."""
    model = Net()
    found = paying_kernels(model, BlockKinds.of(model), batch(), device)
    assert "fusion.sdpa" in found.chosen
    assert "less" in found.chosen["fusion.sdpa"]
    assert "padding" in found.left["fusion.causal_sdpa"]
    assert ("no gain" in found.left.get("fusion.bias_gelu", "")) == (device is CPU)
    assert "fusion.rms_norm" not in found.chosen


@pytest.mark.ranks
@pytest.mark.breadth
def test_auto_replaces_splits_and_checkpoints_each_with_its_reason() -> None:
    sch = slapo.create_schedule(Net(), mesh={"tp": 2}, example_inputs=batch())
    report = slapo_models.auto(sch, kernels=("fusion.sdpa",), memory="1MiB")
    found = names(sch)
    assert found.count("core.replace") == 4
    assert "tp.shard" in found
    assert 0 < found.count("core.checkpoint") <= 4
    assert "as asked for" in sch.explain()
    assert any("checkpointed" in note for note in report.notes)
    with pytest.raises(FitError):
        slapo_models.auto(
            slapo.create_schedule(Net(), mesh={"tp": 1}, example_inputs=batch()), kernels=False, memory="64KiB"
        )


@pytest.mark.ranks
def test_auto_cuts_stages_of_equal_predicted_time() -> None:
    sch = slapo.create_schedule(Net(), mesh={"pp": 2, "tp": 1}, example_inputs=batch())
    slapo_models.auto(sch, kernels=False)
    assert [(record.primitive.name, record.path) for record in sch.records] == [("pipeline.pipeline_split", "blocks.1")]
    assert "equal predicted time" in sch.explain()


UNGUARDED = """
import torch, slapo_core as slapo, slapo_models
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)))
sch = slapo.create_schedule(model, mesh={"tp": 1}, example_inputs=(torch.randn(2, 8),))
slapo_models.auto(sch)
print("went on")
"""


@pytest.mark.ranks
@pytest.mark.breadth
def test_a_script_without_its_guard_is_refused_and_does_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNGUARDED)
    done = subprocess.run([sys.executable, tmp_path / "train.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "went on" not in done.stdout
    assert "LaunchError" in done.stderr
    assert "__main__" in done.stderr


def test_an_unknown_pattern_is_refused() -> None:
    sch = slapo.create_schedule(Net(), mesh={"tp": 1}, example_inputs=batch())
    with pytest.raises(ArgumentError, match="no installed pattern"):
        slapo_models.auto(sch, kernels=("fusion.sdpb",))
    assert not sch.records


@pytest.mark.ranks
@pytest.mark.breadth
def test_the_schedule_of_auto_with_all_of_them_is_right() -> None:
    sch: Any = slapo.create_schedule(Net(), mesh={"tp": 2}, example_inputs=batch())
    slapo_models.auto(sch, memory="1.5MiB")
    assert slapo.verify(sch)
