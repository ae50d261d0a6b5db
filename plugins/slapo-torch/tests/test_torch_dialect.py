"""Target "torch" plans what will be done, and takes its own options and those of DistributedDataParallel."""

from __future__ import annotations

import pytest

import slapo_core as slapo
from slapo_torch.dialect import TorchDialect
from tests.messages import Messages
from tests.support.building import real, split


def test_an_unknown_option_is_named(message: Messages) -> None:
    with pytest.raises(slapo.BuildError) as caught:
        slapo.build(slapo.create_schedule(real("mlp")), bucket_cap=3)
    message(caught, "'bucket_cap'", "bucket_cap_mb")


def test_plan_lists_collectives_and_replicas() -> None:
    schedule = split(slapo.create_schedule(real("mlp"), mesh={"dp": 4, "tp": 2}), "mlp")
    assert str(TorchDialect().plan(schedule, {})) == (
        "plan for target 'torch'\n"
        "  the scheduled Mlp, 3 steps applied\n"
        "  collectives of the steps over mesh_dim 'tp' (2 ranks)\n"
        "  one RNG state for the ranks of mesh_dim 'tp': the first rank's\n"
        "  DistributedDataParallel over mesh_dim 'dp' (4 ranks)"
    )
