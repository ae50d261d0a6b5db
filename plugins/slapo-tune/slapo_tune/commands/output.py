"""What the commands share: JSON, and what is known of a study's log."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from slapo_core import ArgumentError
from slapo_core.spec.sampler import Trial
from slapo_tune.log.reading import Log, read_log
from slapo_tune.space.space import Space
from slapo_tune.study import Study

__all__ = ["print_json", "read", "some", "space_of", "trial_of", "unit_of"]

_MANY = 100_000
"""Points of which tables and pictures are made; of a larger space, the first ones."""


def print_json(value: object) -> None:
    """Print ``value`` with sorted keys."""
    print(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, default=str))


def unit_of(study: Study) -> str:
    """Of the value: the default ``evaluate`` gives samples per second, the user's own whatever it gives."""
    return "samples/s" if study.evaluate is None else "(value)"


def space_of(study: Study) -> Space:
    """The study's own, or that of its function."""
    return study.space if isinstance(study.space, Space) else Space(study.space)


def some(points: Iterable[Any]) -> list[Any]:
    """The first ones of a space, which may have any number."""
    return list(islice(points, _MANY))


def read(study: Study, file: Path) -> Log:
    """The study's log.

    Args:
        study: that has it.
        file: of the study, for the message.

    Raises:
        ArgumentError: there is none yet, or it is of another space.
        LogError: it is damaged, or no log.
    """
    log = Path(study.log)
    if not log.exists():
        raise ArgumentError(f"there is no log {log} yet (in {Path.cwd()})", hint=f"slapo tune run {file}")
    found = read_log(log)
    if found.header.get("fingerprint") != space_of(study).fingerprint():
        raise ArgumentError(
            f"{log} is the log of another space than {file} has now", hint="--log, or the study as it was then"
        )
    return found


def trial_of(trials: Iterable[Trial], number: int) -> Trial:
    """The trial of that number.

    Raises:
        ArgumentError: there is none.
    """
    known = {trial.number: trial for trial in trials}
    if number not in known:
        has = f"trials {min(known)} to {max(known)}" if known else "no trials yet"
        raise ArgumentError(f"there is no trial {number}: the log has {has}")
    return known[number]
