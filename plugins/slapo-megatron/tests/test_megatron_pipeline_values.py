"""Values of every kind cross Megatron's stages, against the reference model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slapo_testing import preload_modules, run_ranks
from tests.support.odd_pipelines import Run, differences

pytestmark = pytest.mark.ranks
preload_modules("slapo_megatron.pipeline", "slapo_pipeline.partition.hook")

TWO = {"pp": 2}
ALONE = {"max_grad_norm": 0.5, "target": "megatron"}


def on(cuts: tuple[str, ...] = ("b",), **changes: Any) -> Run:
    return Run(TWO, cuts=cuts, target="megatron", **changes)


TWICE = ("a", "b", "c")  # two stages a rank
FREED = {"model_parallel_config": {"deallocate_pipeline_outputs": True}}
RUNS = {
    "values of every kind": on(),
    "values of every kind, past stages, of batches of several forms": on(TWICE, forms=((1, 5), (2, 3), (1, 5))),
    "nothing has a gradient at the cut": on(frozen=("emb", "a", "b", "scale", "table"), options=FREED),
    "a rank trains nothing": on(("c",), frozen=("d", "e")),
    "a tie over two ranks, a stage trains nothing": on(TWICE, tied=True, frozen=("c",), options=FREED),
    "a tie over two stages of one rank": on(("emb", "a", "c"), tied=True),
}


def on_two_ranks() -> dict[str, list[str]]:
    from tests.support.cpu_megatron import install

    install()
    torch.set_num_threads(1)
    return {name: differences(run) for name, run in RUNS.items()}


def test_every_value_crosses_and_every_gradient_comes_back() -> None:
    for found in run_ranks(on_two_ranks, world_size=2):
        assert found == {name: [] for name in RUNS}
