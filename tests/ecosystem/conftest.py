"""Fixtures of the plugin tests."""

from __future__ import annotations

from slapo_testing.fixtures import fake_distributions, isolated_registry

__all__ = ["fake_distributions", "isolated_registry"]
