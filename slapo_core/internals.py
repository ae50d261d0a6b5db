"""What the other first-party distributions use of slapo-core besides its public names; not a public interface."""

from slapo_core.plugins import current_registry
from slapo_core.private import (
    SafeFakeTensorMode,
    buffers_of,
    children_of,
    hooks_of,
    is_data_pointer_error,
    module_calls_through,
    parameters_of,
)
from slapo_core.tree import copies, forward as forwards, index as module_index, journal
from slapo_core.tree.render import describe

__all__ = [
    "SafeFakeTensorMode",
    "buffers_of",
    "children_of",
    "copies",
    "current_registry",
    "describe",
    "forwards",
    "hooks_of",
    "is_data_pointer_error",
    "journal",
    "module_calls_through",
    "module_index",
    "parameters_of",
]
