"""What slapo-tune raises."""

from __future__ import annotations

from slapo_core import SlapoError


class StudyError(SlapoError):
    """A study cannot be run: an argument makes no sense, or a function cannot be sent to other processes."""


class LogError(SlapoError):
    """A log cannot be used: it is not a log, of another study, damaged, in use, or cannot be written."""


class SpaceError(SlapoError):
    """A space function uses unsupported candidates or conditions, or allows no point.

    What to do: the message names the symbol and the choices that led there; the hint is the call to write.
    """
