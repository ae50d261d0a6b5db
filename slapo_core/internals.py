"""What the project's other distributions use of slapo-core besides its public names; promised to nobody else."""

from slapo_core.tree import forward as forwards, index as module_index, journal
from slapo_core.tree.render import describe

__all__ = ["describe", "forwards", "journal", "module_index"]
