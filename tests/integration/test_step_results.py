"""What a training step of each target says about itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slapo_testing import preload_modules, run_ranks
from tests.integration.dialects.small import batch, build

preload_modules("deepspeed", "tests.support.cpu_megatron", "slapo_megatron.engine")
pytestmark = [pytest.mark.ranks, pytest.mark.breadth]

FORMS = ("torch tp2", "ZeRO-1 tp2", "megatron tp2", "torch pp2 tp2", "ZeRO-1 pp2 tp2", "megatron pp2 tp2")


def halved(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def facts(forms: list[str]) -> list[list[tuple[Any, Any, bool]]]:
    found = []
    for form in forms:
        engine = build(form, lr_scheduler=halved, loss_weight=lambda one: (one["labels"] > 3).sum())
        results = [engine.train_step(batch(step)) for step in range(2)]
        found.append([(float(one.learning_rate), float(one.tokens), one.seconds > 0) for one in results])
        engine.close()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_results_have_the_facts_of_the_step_under_every_target(world_size: int) -> None:
    forms = [form for form in FORMS if ("pp2" in form) == (world_size == 4)]
    counts = [float((batch(step)["labels"] > 3).sum()) for step in range(2)]
    expected = [(0.01, counts[0], True), (0.005, counts[1], True)]
    for found in run_ranks(facts, forms, world_size=world_size):
        assert found == [expected] * len(forms)
