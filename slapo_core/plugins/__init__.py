"""Finding and loading plugins: what is installed, under which names, in which state."""

from __future__ import annotations

from slapo_core.plugins.loading import PluginWarning
from slapo_core.plugins.local import register_primitive
from slapo_core.plugins.process import current_registry, use_registry
from slapo_core.plugins.registry import Registry

__all__ = ["PluginWarning", "Registry", "current_registry", "register_primitive", "use_registry"]
