"""``balance="time"`` on ranks whose clocks differ: all of them cut where the first one measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.testing import run_ranks
from slapo_pipeline.balance import timing


def scheduled() -> Any:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    return slapo.create_schedule(model, mesh={"dp": 2, "pp": 2}, example_inputs=(torch.zeros(2, 4),))


def every_rank_takes_the_first_ones_answer() -> None:
    rank = torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        # On rank r the block r + 1 is slow, and so every rank would cut somewhere else.
        turns = iter(range(1000))
        patch.setattr(timing, "_kind", lambda module, call: id(module))
        patch.setattr(timing, "_seconds", lambda module, call: 10.0 if next(turns) % 6 == 2 * rank + 1 else 1.0)
        sch = scheduled()
        sch.pipeline_split(stages=2, balance="time")
        assert sch.records[0].primitive.after == ("1",), sch.records

        def fails(module: Any, call: Any) -> float:
            assert rank == 0, "only the first rank measures"
            raise ValueError("no clock")

        patch.setattr(timing, "_seconds", fails)
        sch = scheduled()
        with pytest.raises(slapo.SlapoError) as caught:
            sch.pipeline_split(stages=2, balance="time")
        assert ("ValueError: no clock" if rank == 0 else "failed there") in str(caught.value)
        assert sch.records == ()


@pytest.mark.ranks
def test_all_ranks_cut_where_the_first_one_measured() -> None:
    run_ranks(every_rank_takes_the_first_ones_answer, world_size=4)
