"""Every test starts from the same random state, in whatever order and process it is run."""

from __future__ import annotations

import os
import random
import sys

import pytest

from slapo_testing import preload_modules

os.environ["OMP_NUM_THREADS"] = "1"  # as on ranks: with more threads, sums are rounded in another order

pytest_plugins = ["slapo_testing.fixtures", "tests.deadlines", "tests.messages", "tests.processor", "tests.tiers"]

# What ranks would import one by one, in every launch of them: found by what they have that their server had not.
preload_modules(
    "pytest",
    "importlib_metadata",
    "networkx",
    "setuptools",
    "tomllib",
    "typeguard",
    "slapo_runtime.context",
    "slapo_graph.graph",
    "slapo_torch.engine",
    "slapo_graph.primitives.merged_linear",
    "slapo_testing.checks.equivalence",
    "slapo_verify.child_processes",
    "slapo_runtime.weights.saving",
    "slapo_pipeline.partition.hook",
    "slapo_tp.hooks",
    "slapo_tp.shard",
    "slapo_tp.sync",
    "tests.deadlines",  # for what ranks launch
    "tests.processor",
)


@pytest.fixture(autouse=True, scope="session")
def blame_without_a_clock() -> None:
    """What steps a failing `verify` names must not depend on how busy the machine is."""
    from slapo_verify import verify

    assert verify.__kwdefaults__["blame_seconds"] is not None
    verify.__kwdefaults__["blame_seconds"] = None


@pytest.fixture(autouse=True)
def same_random_state() -> None:
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
