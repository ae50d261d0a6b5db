"""Fixtures for tests of plugins. Import the ones you need into your ``conftest.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slapo_core.plugins import use_registry
from slapo_core.plugins.registry import Registry
from slapo_core.testing.distributions import FakeEnvironment

__all__ = ["fake_distributions", "isolated_registry"]


@pytest.fixture
def fake_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEnvironment]:
    """An empty directory on ``sys.path`` into which a test installs fake distributions."""
    environment = FakeEnvironment(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(str(environment.directory))
    yield environment
    environment.forget_modules()


@pytest.fixture
def isolated_registry() -> Iterator[Registry]:
    """A registry of what is really installed, current for one test: what the test registers ends with it."""
    with use_registry(Registry.discover(environ={})) as registry:
        yield registry
