"""Steps made to do nothing: in full schedules each is missing, with its own name; as they are, nothing is."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_runtime.launcher import run_ranks
from tests.integration.receipts.planted import no_ops

FAMILIES = ("bert", "gpt", "llama", "opt", "roberta", "t5", "wide_resnet")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [name if name == "gpt" else pytest.param(name, marks=pytest.mark.breadth) for name in FAMILIES]
)
def test_each_step_that_does_nothing_is_named(name: str) -> None:
    for found in run_ranks(no_ops, name, {"tp": 2}, world_size=2, timeout=600.0):
        assert found["alarms"] == []
        assert found["seen"] >= 15
        assert_named(found["named"])


def assert_named(named: dict[str, Any]) -> None:
    """Each step alone is missing; a few are loud: the model raises."""
    assert len(named) >= 3
    for step, missing in named.items():
        assert isinstance(missing, str) or step in missing, (step, missing)
    silent = [step for step, missing in named.items() if not isinstance(missing, str)]
    assert len(silent) >= 3
