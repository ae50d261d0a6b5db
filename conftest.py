"""Every test starts from the same random state, in whatever order and process it is run."""

from __future__ import annotations

import random
import sys

import pytest

from slapo_core.testing import preload_modules

pytest_plugins = ["tests.messages", "tests.tiers"]

# What ranks would import one by one, in every launch of them: found by what they have that their server had not.
preload_modules(
    "pytest",
    "importlib_metadata",
    "networkx",
    "setuptools",
    "tomllib",
    "typeguard",
    "slapo_core.building.request",
    "slapo_core.graph.traced",
    "slapo_core.native.engine",
    "slapo_core.primitives.merging",
    "slapo_core.testing.checks.two_ranks",
    "slapo_core.verification.dry",
    "slapo_core.weights.checkpoint",
    "slapo_pipeline.partition.hook",
    "slapo_tp.hooks",
    "slapo_tp.shard",
    "slapo_tp.sync",
)


@pytest.fixture(autouse=True)
def same_random_state() -> None:
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
