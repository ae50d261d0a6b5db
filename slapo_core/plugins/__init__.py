"""Find and load plugins: their distributions, names and states."""

from __future__ import annotations

from slapo_core.plugins.current import current_registry, register_primitive, use_registry
from slapo_core.plugins.metadata import (
    CORE_DISTRIBUTION,
    FIRST_PARTY,
    GROUP_PREFIX,
    KINDS,
    LOCAL_VERSION,
    Entry,
    Kind,
    Plugin,
    State,
    core_version,
    is_identifier,
    name_violation,
    owner_of,
    split_name,
)
from slapo_core.plugins.registry import Registry, class_violations

__all__ = [
    "CORE_DISTRIBUTION",
    "FIRST_PARTY",
    "GROUP_PREFIX",
    "KINDS",
    "LOCAL_VERSION",
    "Entry",
    "Kind",
    "Plugin",
    "Registry",
    "State",
    "class_violations",
    "core_version",
    "current_registry",
    "is_identifier",
    "name_violation",
    "owner_of",
    "register_primitive",
    "split_name",
    "use_registry",
]
