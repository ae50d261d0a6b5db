"""Schedules by name, the options of a pipeline, and what they say of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_runtime.batches import micro_batches
from slapo_torch.dialect import TorchDialect
from slapo_torch.running_stage import PipelineRunner, RunningStage
from slapo_torch.schedules import SCHEDULES, schedule_named, schedule_of
from slapo_torch.torch_pipelining import make_schedule
from tests.messages import Messages
from tests.support.hand_stages import Net, liveness_of, partition_of


def plan(mesh: dict[str, int] | None, **config: Any) -> slapo.Plan:
    return TorchDialect().plan(slapo.create_schedule(nn.Linear(2, 2), mesh=mesh), config)


class _FakeGroup:
    def __init__(self, size: int) -> None:
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: one.name)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_refused_micro_batch_numbers_equal_torchs(schedule: Any, pp: int) -> None:
    for per_rank in (1, 2, 3):
        for count in (1, 2, 3, 4, 5, 6, 7, 9, 12):
            stages = per_rank * pp
            ours = True
            try:
                schedule.check_micro_batches(count, pp)
                ranks = schedule.stage_ranks(stages, pp)
            except slapo.BuildError:
                ours = False
            assert _torch_takes(schedule, stages, count, pp) == ours, (per_rank, count)
            if ours:
                assert sorted(ranks) == sorted(list(range(pp)) * per_rank)


def _torch_takes(schedule: Any, stages: int, count: int, pp: int) -> bool:
    if schedule.is_single and stages != pp:
        return False  # torch takes it, and runs the first stage of each rank only
    group = _FakeGroup(pp)
    own = []
    for index in range(0, stages, pp):
        one = RunningStage.__new__(RunningStage)
        super(RunningStage, one).__init__(nn.Linear(1, 1), index, stages, torch.device("cpu"), group)
        own.append(one)
    try:
        made = make_schedule(schedule.class_name, own[0] if schedule.is_single else own, count, loss_fn=len)
    except ValueError:
        return False
    if not schedule.is_single:
        assert tuple(made.stage_index_to_group_rank[stage] for stage in range(stages)) == schedule.stage_ranks(
            stages, pp
        )
    return True


def test_modules_in_the_wrapper_of_compile_are_refused_by_zero_bubble() -> None:
    partition = partition_of(Net(), 4, 2)
    partition.stages[0].module.add_module("compiled", torch.compile(nn.Linear(1, 1)))
    schedule = schedule_named("zbv_zero_bubble")
    with pytest.raises(slapo.BuildError) as error:
        PipelineRunner(
            partition,
            liveness_of(partition),
            schedule,
            (0, 1, 1, 0),
            0,
            group=_FakeGroup(2),
            device=torch.device("cpu"),
            count=2,
        )
    assert error.value.message.startswith("pipeline_schedule='zbv_zero_bubble' does not run these stages: ")  # by torch
    assert 'module.compile(), or pipeline_schedule="1f1b"' in (error.value.hint or "")


def test_plan_lists_the_pipeline_and_is_reproducible() -> None:
    made = plan({"dp": 2, "pp": 2, "tp": 2}, pipeline_schedule="dualpipe_v", batch_axes={"bias": None})
    assert str(made) == (
        "plan for target 'torch'\n"
        "  the scheduled Linear, 0 steps applied\n"
        "  a pipeline over mesh_dim 'pp' (2 ranks): 4 micro-batches a step, schedule dualpipe_v\n"
        "  two stages on each of its ranks, there and back\n"
        "  weight gradients after input gradients, unless a stage checkpoints, hooks tensors or is compiled\n"
        "  collectives of the steps over mesh_dim 'tp' (2 ranks)\n"
        "  one RNG state for the ranks of mesh_dim 'tp': the first rank's\n"
        "  the mean of gradients, exchanged as each stage ends, over mesh_dim 'dp' (2 ranks)"
    )
    assert plan({"dp": 2, "pp": 2, "tp": 2}, **made.config) == made
    assert plan({"pp": 3}).config == {
        "pipeline_schedule": None,
        "microbatches": 3,
        "batch_axes": {},
        "data_parallel": "ddp",
        "precision": None,
        "fp32": (),
        "bucket_cap_mb": 25,
    }
    assert schedule_of(plan({"pp": 3}).config, 3, 3).name == "1f1b"
    assert schedule_of(plan({"pp": 3}).config, 6, 3).name == "interleaved_1f1b"


@pytest.mark.parametrize(
    ("mesh", "config", "word"),
    [
        ({"pp": 4}, {"pipeline_schedule": "1f1b", "microbatches": 3}, "microbatches=3 on pp=4"),
        ({"pp": 2}, {"pipeline_schedule": "interleaved_1f1b", "microbatches": 5}, "a multiple of the rounds"),
        ({"pp": 2}, {"pipeline_schedule": "dualpipe_v", "microbatches": 3}, "2 * pp stages"),
        ({"pp": 2}, {"microbatches": 0}, "got 0"),
        ({"pp": 2}, {"pipeline_schedule": "zero"}, "'zero'"),
        ({"pp": 2}, {"batch_axes": {"x": "first"}}, "got {'x': 'first'}"),
        ({"pp": 2}, {"find_unused_parameters": True}, "'find_unused_parameters'"),
        ({"dp": 2}, {"microbatches": 4}, "'microbatches'"),
        ({"pp": 2}, {"bucket_cap_mb": 0}, "bucket_cap_mb"),
        (None, {"microbatches": 4}, "got no mesh"),
    ],
)
def test_options_that_cannot_be_are_refused(
    mesh: dict[str, int] | None, config: dict[str, Any], word: str, message: Messages
) -> None:
    with pytest.raises(slapo.BuildError) as error:
        plan(mesh, **config)
    message(error, word)


def test_wrong_number_of_stages_is_refused_with_fitting_schedules(message: Messages) -> None:
    with pytest.raises(slapo.BuildError) as error:
        schedule_named("gpipe").stage_ranks(4, 2)
    message(error, "'gpipe' on pp=2", "got 4, by 3 cuts")
    assert schedule_named("zbv_zero_bubble").stage_ranks(6, 3) == (0, 1, 2, 2, 1, 0)
    assert schedule_named("looped_bfs").stage_ranks(6, 3) == (0, 1, 2, 0, 1, 2)


def test_batches_are_cut_along_batch_axes(message: Messages) -> None:
    x, time_first, bias = torch.arange(8).reshape(4, 2), torch.arange(12).reshape(3, 4), torch.ones(1, 2)
    batch = {"x": x, "deep": [time_first], "bias": bias, "flag": True}
    axes: dict[Any, int | None] = {"deep": 1, "bias": None}
    first, second = micro_batches(batch, 2, option="microbatches", axes=axes)
    assert torch.equal(second["deep"][0], time_first[:, 2:])
    assert (first["bias"] is bias, second["flag"]) == (True, True)
    assert torch.equal(first["x"], x[:2])
    one, two = micro_batches((x, time_first), 2, option="microbatches", axes={1: 1})
    assert [part.shape for part in (*one, *two)] == [(2, 2), (3, 2), (2, 2), (3, 2)]
    with pytest.raises(slapo.BuildError) as error:
        micro_batches(batch, 2, option="microbatches", axes={"deep": 1})
    message(error, "batch['deep'][0]: 4", "batch_axes={'bias': None}")
    with pytest.raises(slapo.BuildError) as error:
        micro_batches(batch, 3, option="microbatches", axes=axes)
    message(error, "4 samples", "microbatches=3")
    with pytest.raises(slapo.BuildError) as caught:
        micro_batches(batch, 2, option="microbatches", axes={**axes, "x": 2})
    message(caught, "axis 2 of batch['x']")
