"""The distributions of this repository are as light to import as the kit asks of any plugin."""

from __future__ import annotations

import pytest

from slapo_core.plugins import current_registry
from slapo_testing.conformance import check_plugin

pytestmark = pytest.mark.slow
_FURTHER = (
    "slapo-core", "slapo-deepspeed", "slapo-fusion", "slapo-graph", "slapo-lightning", "slapo-loss", "slapo-megatron",
    "slapo-pipeline", "slapo-runtime", "slapo-testing", "slapo-torch", "slapo-tp", "slapo-tune",
    "slapo-view",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", ["slapo-estimate", *(pytest.param(one, marks=pytest.mark.breadth) for one in _FURTHER)]
)
def test_own_entry_points_are_light_to_import(name: str) -> None:
    registry = current_registry()
    plugin = next(one for one in registry.plugins if one.name == name)
    found = next(one for one in check_plugin(plugin, registry) if one.check == "light_import")
    assert found.outcome == "passed", found.message
