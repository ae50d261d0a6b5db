"""What the other first-party distributions use of slapo-core besides its public names; not a public interface."""

from slapo_core.tree import forward as forwards, index as module_index, journal
from slapo_core.tree.render import describe

__all__ = ["describe", "forwards", "journal", "module_index"]
