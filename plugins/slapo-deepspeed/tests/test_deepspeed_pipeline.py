"""Stages in DeepSpeed's pipeline, against the reference model in one process."""

from __future__ import annotations

import pytest
import torch

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from tests.messages import Messages
from tests.support.odd_pipelines import Net, Run, batch, differences

pytestmark = pytest.mark.ranks
preload_modules(
    "deepspeed.pipe",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "slapo_deepspeed.pipeline",
    "slapo_pipeline.partition.hook",
)

THREE = {"pp": 3}
RUNS = {
    "values of every kind, past stages": Run(THREE, forms=((1, 5), (2, 5), (1, 3), (1, 5))),
    "a stage trains its bias only": Run(THREE, frozen=("c.weight", "emb"), micro_batches=3),
    "a tie over the first and the last stage": Run(THREE, tied=True),
    "a tie, without ZeRO": Run(THREE, tied=True, config={"zero_optimization": {"stage": 0}}),
}


def on_three_ranks() -> tuple[dict[str, list[str]], str]:
    torch.set_num_threads(1)
    with pytest.raises(slapo.BuildError) as caught:
        Run(THREE, frozen=("c",)).build()
    return {name: differences(run) for name, run in RUNS.items()}, str(caught.value)


@pytest.mark.breadth
def test_every_value_crosses_and_every_gradient_comes_back(message: Messages) -> None:
    ranks = run_ranks(on_three_ranks, world_size=3)
    assert [found for found, _ in ranks] == [{name: [] for name in RUNS}] * 3
    assert len({text for _, text in ranks}) == 1
    message(ranks[0][1], "no trained parameters on rank 1 of 'pp'")


def test_the_model_is_what_it_seems() -> None:
    """The reference model reads and writes everything: a change of any value that crosses changes the loss."""
    model = Net()
    model(**batch(2, 0)).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())
