"""Models train in shards over replicas as in one process; `tools/sharded_matrix.py` runs more."""

from __future__ import annotations

import pytest

from slapo_testing import preload_modules
from tests.integration.dialects.sampling import differing
from tests.integration.sharded.cases import WAYS, ShardedCell, cells
from tests.integration.sharded.models import SUBJECTS

preload_modules("torch.distributed.fsdp", "slapo_tp", "slapo_loss", "slapo_fusion", "slapo_torch.sharded_data")
pytestmark = pytest.mark.ranks

SAMPLE = [cells(SUBJECTS[number % len(SUBJECTS)])[number] for number in range(len(WAYS))]
"""Every way to run, each with one of the families in turn."""

QUICK = [SAMPLE[5]]


def assert_equal(chosen: list[ShardedCell], world_size: int) -> None:
    found = differing(chosen, world_size)
    assert found
    assert {what: said[:5] for what, said in found.items() if said} == {}


@pytest.mark.breadth
def test_sharded_models_train_as_one_process() -> None:
    assert_equal(QUICK, 4)


@pytest.mark.breadth
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_way_to_shard_trains_as_one_process(world_size: int) -> None:
    assert_equal([cell for cell in SAMPLE if cell not in QUICK], world_size)
