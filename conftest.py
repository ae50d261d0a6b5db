"""Every test starts from the same random state, in whatever order and process it is run."""

from __future__ import annotations

import random
import sys

import pytest

from slapo_core.testing import preload_modules

preload_modules("pytest", "slapo_core.native.engine", "slapo_core.testing.checks.two_ranks", "slapo_tp")


@pytest.fixture(autouse=True)
def same_random_state() -> None:
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
