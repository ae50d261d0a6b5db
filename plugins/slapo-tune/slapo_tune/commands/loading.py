"""A study file, with what the command line changes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from slapo_tune.loading import load_study
from slapo_tune.study import Study

__all__ = ["load"]


def load(file: Path, *, log: Path | None = None, trials: int | None = None, sampler: str | None = None) -> Study:
    """The study of a file.

    Args:
        file: Python, with a :class:`slapo_tune.Study` named ``study`` at its top level.
        log: replaces the study's own.
        trials: replaces the study's own.
        sampler: replaces the study's own.

    Raises:
        StudyError: there is no such file, it cannot be imported, or it has no such study.
    """
    changes: dict[str, Any] = {"log": log, "trials": trials, "sampler": sampler}
    return replace(load_study(file), **{name: value for name, value in changes.items() if value is not None})
