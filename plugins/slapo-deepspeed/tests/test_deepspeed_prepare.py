"""A scheduled model in a script's own ``deepspeed.initialize`` trains as the reference model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import slapo_core as slapo
import slapo_deepspeed
from tests.messages import Messages

EXAMPLE = Path(__file__).parents[3] / "examples" / "deepspeed_initialize.py"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHER = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", "29611"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "launch", [TORCHRUN, pytest.param(LAUNCHER, marks=pytest.mark.breadth)], ids=["torchrun", "deepspeed"]
)
def test_the_example_trains_as_the_reference_model(launch: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It clips the norm of all gradients, and asserts that losses are equal to 1e-5 in float32."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    command = [*launch, str(EXAMPLE), "--steps", "3", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 2: loss " in done.stdout


def test_a_pipeline_is_left_to_build(message: Messages) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh={"pp": 2})
    with pytest.raises(slapo.BuildError) as caught:
        slapo_deepspeed.prepare(sch)
    message(caught, "no pipeline", "slapo.build(")
    assert not sch.is_sealed


def test_the_processes_must_be_there(message: Messages) -> None:
    with pytest.raises(slapo.BuildError) as caught:
        slapo_deepspeed.prepare(slapo.create_schedule(nn.Linear(2, 2), mesh={"dp": 2}))
    message(caught, "processes", "torchrun")
