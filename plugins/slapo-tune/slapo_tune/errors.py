"""Errors of slapo-tune."""

from __future__ import annotations

from slapo_core import SlapoError


class StudyError(SlapoError):
    """A study is invalid: an argument has a wrong value, or a function cannot be sent to other processes."""


class LogError(SlapoError):
    """A log cannot be used: not a log, of another study, damaged, in use, or not writable."""


class SpaceError(SlapoError):
    """A space function uses unsupported candidates or conditions, or allows no point.

    What to do: the message names the symbol and the choices before it; the hint is the corrected call.
    """
