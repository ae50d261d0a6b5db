"""What slapo-tune raises beside the errors of a space."""

from __future__ import annotations

from slapo_core import SlapoError

__all__ = ["LogError", "StudyError"]


class StudyError(SlapoError):
    """A study cannot be run: an argument makes no sense, or a function cannot be sent to other processes."""


class LogError(SlapoError):
    """A log cannot be used: it is no log, of another study, damaged, in use, or cannot be written."""
