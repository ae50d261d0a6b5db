"""A scheduled model in a script's own ``deepspeed.initialize`` trains as the reference model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
import slapo_deepspeed
from slapo_testing import run_ranks
from tests.messages import Messages
from tests.support.programs import run_program

EXAMPLE = Path(__file__).parents[3] / "examples" / "deepspeed_initialize.py"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHER = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", "29611"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))


def data(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def plain(sch: slapo.Schedule, stage: int) -> list[float]:
    """The losses of a schedule's model that DeepSpeed is given without anything else."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which is compiled for minutes
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.1, "optimizer": optimizer}
    zero = {"stage": stage, "reduce_bucket_size": 10**5}
    engine, *_ = deepspeed.initialize(model=sch.model, config={**config, "zero_optimization": zero})
    losses, mesh = [], sch.mesh
    for step in range(3):
        batch = data(step)
        if mesh is not None and mesh.size("dp") > 1:
            batch = batch.chunk(mesh.size("dp"))[mesh.rank("dp")]
        loss = (engine(batch) - batch).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
        dist.all_reduce(losses[-1])
    return [float(loss) / dist.get_world_size() for loss in losses]


def unprepared() -> tuple[list[float], list[str]]:
    """The losses of replicas, and what each stage says of a split model."""
    replicas = slapo.create_schedule(net(), mesh={"dp": 2})
    replicas["0"].checkpoint()
    refused = []
    for stage in range(4):
        sch = slapo.create_schedule(net(), mesh={"tp": 2})
        sch["0"].shard(["weight", "bias"], axis=0).sync("backward")
        sch["2"].shard("weight", axis=1).sync("forward")
        with pytest.raises(slapo.MeshError) as caught:
            plain(sch, stage)
        refused.append(str(caught.value))
    return plain(replicas, 1), refused


@pytest.mark.ranks
def test_deepspeed_alone_trains_replicas_right_and_is_refused_with_a_split_model(message: Messages) -> None:
    reference = net()
    optimizer, expected = torch.optim.AdamW(reference.parameters(), lr=1e-2), []
    for step in range(3):
        loss = (reference(data(step)) - data(step)).square().mean()
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
    (losses, refused), other = run_ranks(unprepared, world_size=2)
    assert (losses, refused) == other
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(set(refused)) == 1
    message(refused[0], "DeepSpeedEngine has no schedule", "slapo_deepspeed.prepare(sch)")


@pytest.mark.ranks
def test_the_example_trains_as_the_reference_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It clips the norm of all gradients, and asserts that losses are equal to 1e-5 in float32."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert "step 2: loss " in run_program(EXAMPLE, "--steps", "3", "--device", "cpu", processes=2)


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("launch", [TORCHRUN, LAUNCHER], ids=["torchrun", "deepspeed"])
def test_the_example_is_started_by_both_launchers(launch: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
