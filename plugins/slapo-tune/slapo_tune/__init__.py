"""Tune schedules: a symbolic space, memory predictions, and trials in processes of their own.

``tune(make_model, space, schedule, ...)`` searches from Python, ``slapo tune run STUDY.py`` from the command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slapo_tune.errors import LogError, StudyError
    from slapo_tune.log import Log, read_log
    from slapo_tune.search import SearchResult, tune
    from slapo_tune.space import Space
    from slapo_tune.study import Study, load_study
    from slapo_tune.training import Run
    from slapo_tune.winner import Winner, best, best_file

__all__ = [
    "Log",
    "LogError",
    "Run",
    "SearchResult",
    "Space",
    "Study",
    "StudyError",
    "Winner",
    "best",
    "best_file",
    "load_study",
    "read_log",
    "tune",
]

_HOMES = {
    "Log": "slapo_tune.log",
    "LogError": "slapo_tune.errors",
    "SearchResult": "slapo_tune.search",
    "Run": "slapo_tune.training",
    "Space": "slapo_tune.space",
    "Study": "slapo_tune.study",
    "StudyError": "slapo_tune.errors",
    "Winner": "slapo_tune.winner",
    "best": "slapo_tune.winner",
    "best_file": "slapo_tune.winner",
    "load_study": "slapo_tune.study",
    "read_log": "slapo_tune.log",
    "tune": "slapo_tune.search",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
