"""Find and load plugins: their distributions, names and states."""

from __future__ import annotations

from slapo_core.plugins.current import current_registry, register_primitive, use_registry
from slapo_core.plugins.registry import Registry

__all__ = ["Registry", "current_registry", "register_primitive", "use_registry"]
