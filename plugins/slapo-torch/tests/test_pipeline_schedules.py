"""Stages under every schedule compute what the reference model does over the same micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from slapo_testing import run_ranks
from slapo_torch.running_stage import PipelineRunner
from slapo_torch.schedules import SCHEDULES, PipelineSchedule
from tests.support import hand_stages
from tests.support.hand_stages import Net, batch, cut, liveness_of, partition_of


def cases(pp: int) -> list[tuple[PipelineSchedule, int, int]]:
    """Schedule, stages and micro-batches: the fewest, and an odd number."""
    found = []
    for schedule in SCHEDULES:
        for stages in (pp, 2 * pp):
            if schedule.per_rank in (None, stages // pp):
                allowed = [count for count in (1, 2, 3, 5, 7, 8) if schedule.allows(count, pp)]
                counts = {allowed[0], allowed[(len(allowed) - 1) // 2]}
                found += [(schedule, stages, count) for count in sorted(counts)[-1 if pp == 4 else 0 :]]
    return found


def reference(net: Net, count: int) -> dict[str, Any]:
    losses, outputs = [], []
    for piece in cut(batch(2 * count), count):
        output = net(**piece)
        (output["loss"] / count).backward()
        losses.append(output["loss"].detach())
        outputs.append(output)
    return {"loss": torch.stack(losses).mean(), "logits": torch.cat([one["logits"].detach() for one in outputs])}


def on_rank(pp: int, *, checkpoints: bool = False, hooks: bool = False) -> list[str]:
    """What differs, for every case."""
    torch.set_num_threads(1)
    rank, found = dist.get_rank(), []
    chosen = [case for case in cases(pp) if not checkpoints or (case[0].splits_backward and case[1] > pp)]
    for schedule, stages, count in chosen:
        case = f"{schedule.name} {stages} stages {count} micro-batches"
        untouched, net = Net(hooks=hooks), Net(checkpoints=checkpoints, hooks=hooks)
        expected = reference(untouched, count)
        partition = partition_of(net, stages, 2)
        runner = PipelineRunner(
            partition,
            liveness_of(partition),
            schedule,
            schedule.stage_ranks(stages, pp),
            rank,
            group=dist.group.WORLD,
            device=torch.device("cpu"),
            count=count,
        )
        before = hand_stages.Double.passes
        work = runner.run(cut(batch(2 * count), count), lambda _, pieces: pieces["loss"], backward=True)
        passes = hand_stages.Double.passes - before
        if any(7 - 8 // stages < stage.stage_index * 8 // stages <= 6 for stage in runner.stages) and passes != count:
            found.append(f"{case}: a custom function ran {passes} times backward")
        for stage in runner.stages:
            if schedule.splits_backward and bool(stage.unsplit_reason) != (checkpoints and _has_checkpoint(stage)):
                found.append(f"{case}: stage {stage.stage_index} is whole because {stage.unsplit_reason!r}")
        own = {number for stage in runner.stages for number in map(int, stage.submod.blocks)}
        if sorted(net.hooked) != sorted(number for number in untouched.hooked if number in own):
            found.append(f"{case}: hooks ran {net.hooked}")
        if schedule.stage_ranks(stages, pp)[-1] == rank:
            loss = torch.stack([work.losses[number] for number in range(count)]).mean()
            if not torch.allclose(loss, expected["loss"], rtol=0, atol=1e-13):
                found.append(f"{case}: loss {loss} instead of {expected['loss']}")
        for (name, parameter), other in zip(net.named_parameters(), untouched.parameters(), strict=True):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
            wanted = torch.zeros_like(other) if other.grad is None else other.grad
            if not torch.allclose(gradient, wanted, rtol=0, atol=1e-13):
                found.append(f"{case}: gradient of {name} differs by {(gradient - wanted).abs().max():.1e}")
        for name, buffer in net.named_buffers():
            if int(name.split(".")[1]) in own and not torch.allclose(
                buffer, untouched.get_buffer(name), rtol=0, atol=1e-13
            ):
                found.append(f"{case}: {name} differs")
    return found


def _has_checkpoint(stage: Any) -> bool:
    return any(block.checkpoints for block in stage.submod.blocks.values())


@pytest.mark.ranks
@pytest.mark.parametrize("pp", [pytest.param(2, marks=pytest.mark.breadth), 4])
def test_every_schedule_gives_reference_gradients(pp: int) -> None:
    assert len({schedule.name for schedule, _, _ in cases(pp)}) == 7
    for differing in run_ranks(on_rank, pp, world_size=pp):
        assert differing == []


@pytest.mark.ranks
def test_checkpointed_and_hooked_modules_are_exact_under_every_schedule() -> None:
    for differing in run_ranks(on_rank, 2, world_size=2, checkpoints=True, hooks=True):
        assert differing == []
