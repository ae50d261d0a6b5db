"""Finding and loading plugins: what is installed, under which names, in which state."""

from __future__ import annotations

from slapo_core.plugins.registry import Registry, current_registry, register_primitive, use_registry

__all__ = ["Registry", "current_registry", "register_primitive", "use_registry"]
