"""What Megatron's ranks wait for, and how many micro-batches they take, without ranks."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_core import BuildError
from slapo_megatron.config import check_stages
from slapo_megatron.pipeline import order_of
from tests.messages import Messages

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
        (1, None, "microbatches is 1", "microbatches=2"),
        (3, None, "smaller than 2", "microbatches=4"),
        (4, 6, "groups of 6", "microbatches=6"),
        (4, 1, f"'{GROUP}' of model_parallel_config is 1", "leave it out"),
    ],
)
def test_what_megatron_would_refuse_in_the_first_step_is_refused(
    count: int, group: int | None, problem: str, hint: str, message: Messages
) -> None:
    config = options(count, group)
    check_stages(config, 2, 2)
    with pytest.raises(BuildError) as error:
        check_stages(config, 4, 2)
    message(error, problem)
    assert hint in str(error.value.hint)


def options(count: int, group: int | None) -> dict[str, Any]:
    return {"model_parallel_config": {GROUP: group}, "microbatches": count, "origins": {}}


@pytest.mark.parametrize(("count", "group"), [(2, None), (4, None), (5, 3), (4, 4), (8, 3)])
def test_what_it_takes_is_accepted(count: int, group: int | None) -> None:
    check_stages(options(count, group), 4, 2)
