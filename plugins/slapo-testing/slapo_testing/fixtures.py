"""Pytest fixtures for tests of plugins: import them into your ``conftest.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slapo_core.plugins import Registry, use_registry
from slapo_testing.distributions import FakeEnvironment


@pytest.fixture
def fake_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEnvironment]:
    """Provide an empty directory on ``sys.path`` for fake distributions."""
    environment = FakeEnvironment(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(str(environment.directory))
    yield environment
    environment.forget_modules()


@pytest.fixture
def isolated_registry() -> Iterator[Registry]:
    """Use a separate registry of this environment for one test."""
    with use_registry(Registry.discover(environ={})) as registry:
        yield registry
