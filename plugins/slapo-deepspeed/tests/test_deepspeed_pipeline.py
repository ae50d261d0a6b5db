"""Stages in DeepSpeed's pipeline, against the reference model in one process."""

from __future__ import annotations

import pytest
import torch

from slapo_testing import preload_modules, run_ranks
from tests.support.odd_pipelines import Net, Run, batch, differences

pytestmark = pytest.mark.ranks
preload_modules(
    "deepspeed.pipe",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "slapo_deepspeed.pipeline",
    "slapo_pipeline.partition.hook",
)

THREE = {"pp": 3}
CONFIGURED = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.01}}
RUNS = {
    "values of every kind, past stages": Run(THREE, forms=((1, 5), (2, 5), (1, 3), (1, 5))),
    "nothing has a gradient at the first cut": Run(THREE, frozen=("emb", "a", "b", "scale", "table")),
    "a rank trains nothing": Run(THREE, frozen=("c",), micro_batches=3),
    "a rank trains nothing, without ZeRO": Run(THREE, frozen=("c",), config={"zero_optimization": {"stage": 0}}),
    "a rank trains nothing, by DeepSpeed's optimizer": Run(THREE, frozen=("c",), config={"optimizer": CONFIGURED}),
    "only the first stage is trained": Run(THREE, frozen=("c", "d", "e"), micro_batches=1),
    "a tie over the first and the last stage": Run(THREE, tied=True),
    "a tie, without ZeRO": Run(THREE, tied=True, config={"zero_optimization": {"stage": 0}}),
}


def on_three_ranks() -> dict[str, list[str]]:
    torch.set_num_threads(1)
    return {name: differences(run) for name, run in RUNS.items()}


@pytest.mark.breadth
def test_every_value_crosses_and_every_gradient_comes_back() -> None:
    for found in run_ranks(on_three_ranks, world_size=3):
        assert found == {name: [] for name in RUNS}


def test_the_model_is_what_it_seems() -> None:
    """The reference model reads and writes everything: a change of any value that crosses changes the loss."""
    model = Net()
    model(**batch(2, 0)).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())
