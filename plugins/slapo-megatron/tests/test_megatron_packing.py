"""What Megatron's ranks wait for, and how many micro-batches they take, without ranks."""

from __future__ import annotations

import pytest

from slapo_core import BuildError
from slapo_megatron.pipeline.messages import order_of
from slapo_megatron.pipeline.micro_batches import check_micro_batches

GROUP = "microbatch_group_size_per_vp_stage"


@pytest.mark.parametrize(
    ("count", "chunks", "group"), [(2, 2, 2), (4, 2, 2), (5, 2, 3), (8, 3, 2), (7, 2, 5), (3, 1, 3), (1, 1, 1)]
)
def test_stages_run_in_the_order_of_megatrons_own_table(count: int, chunks: int, group: int) -> None:
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    assert order_of(chunks, count, group) == [chunk for _, chunk in get_schedule_table(count, chunks, group)]


@pytest.mark.parametrize(
    ("count", "group", "problem", "hint"),
    [
        (1, None, "microbatches=1 is less than pp size 2", "microbatches=2, or a multiple"),
        (3, None, "which leaves 1 of microbatches=3, fewer than pp size 2", "microbatches=2 or 4"),
        (4, 6, f"6 micro-batches each time ({GROUP}), which has to be from pp size 2 to microbatches=4", GROUP),
        (4, 1, "which has to be from pp size 2 to microbatches=4", f'{{"{GROUP}": 2}}'),
    ],
)
def test_what_the_interleaved_schedule_does_not_take_is_refused_before(
    count: int, group: int | None, problem: str, hint: str
) -> None:
    options = {"microbatches": count, "model_parallel_config": {} if group is None else {GROUP: group}}
    check_micro_batches(options, 2, 2)
    with pytest.raises(BuildError) as error:
        check_micro_batches(options, 4, 2)
    assert "each rank runs 2 stages in turn" in str(error.value)
    assert problem in str(error.value)
    assert hint in str(error.value)


@pytest.mark.parametrize(("count", "group"), [(2, None), (4, None), (5, 3), (4, 4), (8, 3)])
def test_what_it_takes_is_accepted(count: int, group: int | None) -> None:
    check_micro_batches({"microbatches": count, "model_parallel_config": {GROUP: group}}, 4, 2)
