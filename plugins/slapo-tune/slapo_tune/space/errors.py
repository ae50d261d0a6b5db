"""What can be wrong with a space."""

from __future__ import annotations

from slapo_core import SlapoError

__all__ = ["SpaceError"]


class SpaceError(SlapoError):
    """A space function does what a space cannot be made of, or allows no point.

    What to do: the message names the symbol and the choices that led there; the hint is the call to write.
    """
