"""Find and load plugins: their distributions, names and states."""

from __future__ import annotations

from slapo_core.plugins.registry import Registry, current_registry, register_primitive, use_registry

__all__ = ["Registry", "current_registry", "register_primitive", "use_registry"]
