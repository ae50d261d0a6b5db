"""Two ranks that share one GPU and communicate over gloo: verified schedules, replicas, and a rank that is killed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo_core as slapo
from tests.gpu.subjects import batches, close, on_ranks, scheduled, stack
from tests.gpu.targets import watched


def verified(name: str, mesh: dict[str, int], dtype: str, device: str) -> dict[str, Any]:
    report = slapo.verify(
        scheduled(name, device, getattr(torch, dtype), mesh=mesh, **({"stages": 2} if "pp" in mesh else {}))
    )
    return {"steps": report.steps_verified, "ranks": report.world_size}


@pytest.mark.gpu(11)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensor_parallel_llama_is_right(device: torch.device, dtype: str) -> None:
    for found in on_ranks(verified, "llama", {"tp": 2}, dtype, device=device, ranks=2):
        assert found["ranks"] == 2
        assert found["steps"] > 0


@pytest.mark.gpu(20)
def test_stages_with_dropout_are_right(device: torch.device) -> None:
    """Each rank runs its stage with the random numbers of the whole model."""
    for found in on_ranks(verified, "bert", {"pp": 2, "tp": 1}, "float32", device=device, ranks=2):
        assert found["ranks"] == 2


def wrong(device: str) -> str:
    """A tensor-parallel LLaMA without one of its all-reduces."""
    sch = scheduled("llama", device, mesh={"tp": 2}, kernels=False, checkpoint=0.0)
    records = [record for record in sch.records if record.primitive.name != "tp.sync"]
    assert len(records) < len(sch.records)
    sch.undo(to=next(record.index for record in sch.records if record.primitive.name == "tp.sync"))
    try:
        slapo.verify(sch)
    except slapo.SlapoError as error:
        return type(error).__name__
    return ""


@pytest.mark.gpu(20)
def test_a_missing_synchronization_is_found(device: torch.device) -> None:
    assert set(on_ranks(wrong, device=device, ranks=2)) <= {"VerifyError", "TraceError"}


# -- replicas ---------------------------------------------------------------------------------------------------------


HALF = ("float16", "bfloat16", "float32")


def averaged(device: str) -> dict[str, Any]:
    """Large gradients, whose sum over the replicas float16 does not hold, and whose mean it does."""
    from slapo_torch.replica_gradients import GradientAverage

    def average(dtype: str, count: int) -> list[float]:
        parameters = [nn.Parameter(torch.zeros(3, dtype=getattr(torch, dtype), device=device)) for _ in range(3)]
        for parameter in parameters[:count]:
            parameter.grad = torch.full_like(parameter, 4e4)
        exchange = GradientAverage(dist.group.WORLD, bucket_bytes=1 << 20)

        def both() -> None:
            exchange.begin(parameters)
            exchange.finish()

        found = watched(both, device)
        waits.extend(found if count == 3 else [])  # a gradient that is missing here is asked for
        return [float(parameter.grad.float().max()) for parameter in parameters]

    waits: list[str] = []
    means = {name: [average(name, 3), average(name, 2 + dist.get_rank())] for name in HALF}
    return {"means": means, "own": [one for one in waits if one.startswith("replica_gradients.py")]}


@pytest.mark.gpu(7)
def test_the_mean_of_large_gradients_does_not_overflow(device: torch.device) -> None:
    for found in on_ranks(averaged, device=device, ranks=2):
        for name, (everywhere, elsewhere) in found["means"].items():
            assert everywhere == pytest.approx([4e4] * 3, rel=1e-2), name
            assert elsewhere == pytest.approx([4e4, 4e4, 2e4], rel=1e-2), name  # the last one: on one rank only
        assert found["own"] == []


def exchanged(device: str) -> dict[str, Any]:
    """The loss of two stages: its value on both ranks, and who waited for the device."""
    from slapo_runtime.engine import PipelineSteps
    from slapo_runtime.stages.runner import SignatureFacts

    sch = slapo.create_schedule(stack(device, layers=2), mesh={"pp": 2})

    class Steps(PipelineSteps):
        _mesh = sch.mesh  # type: ignore[assignment]

    last = dist.get_rank() == 1
    own = [torch.full((), value, device=device) for value in (1.0, 2.0)] if last else []
    steps, form, values = Steps(), SignatureFacts(), []

    def call() -> None:
        values.append(steps._exchange_loss(form, own, drew=False, device=torch.device(device)))

    call()  # the first one tells dtype and random numbers, and waits
    stacks = watched(call, device)
    return {"losses": [float(value) for value in values], "own": [one for one in stacks if one.startswith("engine.py")]}


@pytest.mark.gpu(4.1)
def test_the_loss_of_a_pipeline_is_exchanged_without_a_wait(device: torch.device) -> None:
    for found in on_ranks(exchanged, device=device, ranks=2):
        assert found["losses"] == [1.5, 1.5]
        assert found["own"] == []


def squared(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def replicated(device: str) -> dict[str, Tensor]:
    """Two replicas of target torch, each with half of every batch."""
    sch = slapo.create_schedule(stack(device, norm=True).eval(), mesh={"dp": 2})
    engine = slapo.build(sch, optimizer=sgd, loss=squared, max_grad_norm=1.0)
    for x in batches(3, device=device):
        engine.train_step((x.chunk(2)[dist.get_rank()],))
    state = engine.state_dict()
    return {name: tensor.cpu() for name, tensor in state.items() if "running" not in name and "tracked" not in name}


@pytest.mark.gpu(19)
def test_replicas_stay_together(device: torch.device) -> None:
    first, second = on_ranks(replicated, device=device, ranks=2)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


class Positions(nn.Module):
    """A model with a large buffer that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("table", torch.randn(1024, 32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.get_buffer("table")[: len(x)])  # type: ignore[no-any-return]


def sent(device: str) -> dict[str, int]:
    """Collectives of one step behind two others, by name."""
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)
    sch = slapo.create_schedule(Positions().to(device), mesh={"dp": 2})
    engine = slapo.build(sch, optimizer=sgd, loss=squared)
    x = torch.randn(4, 32, device=device)
    for _ in range(2):
        engine.train_step((x,))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        engine.train_step((x,))
    return {
        event.key: event.count
        for event in profiler.key_averages()
        if any(name in event.key for name in ("broadcast", "allreduce", "all_reduce"))
    }


@pytest.mark.gpu(19)
def test_collectives_of_a_step_of_two_replicas(device: torch.device, measured: Any) -> None:
    found, _ = on_ranks(sent, device=device, ranks=2)
    measured(collectives=found)
    assert any("reduce" in name for name in found), found


# -- one of them is gone ----------------------------------------------------------------------------------------------


def killed(device: str) -> None:
    """One rank dies between two steps; the other waits for it in the next."""
    sch = slapo.create_schedule(stack(device), mesh={"dp": 2})
    engine = slapo.build(sch, optimizer=sgd, loss=squared)
    for step, x in enumerate(batches(3, device=device)):
        if step == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.train_step((x,))


@pytest.mark.gpu(19)
def test_a_killed_rank_is_named_and_the_device_is_free_afterwards(device: torch.device, measured: Any) -> None:
    start = time.monotonic()
    with pytest.raises(slapo.RankFailedError) as failed:
        on_ranks(killed, device=device, ranks=2)
    measured(seconds_until_it_is_known=time.monotonic() - start)
    assert 1 in failed.value.failures
    assert failed.value.codes[1] == -signal.SIGKILL
    first, second = on_ranks(replicated, device=device, ranks=2)
    close(first, second)
