"""Deadlines end what hangs, and not what is slow: launches of tests have ten minutes, however busy the machine is."""

from __future__ import annotations

import dataclasses
from typing import Any

from slapo_runtime import launcher

_LEAST = 600.0  # seconds; a launch that takes them hangs
_OF_DEADLINES = 60.0  # seconds; what is shorter belongs to a test of deadlines

_start = launcher._Run.start


def _patient(run: Any, context: Any, job: Any) -> None:
    if run.timeout >= _OF_DEADLINES:
        run.timeout = max(run.timeout, _LEAST)
        job = dataclasses.replace(job, timeout=run.timeout)
    _start(run, context, job)


launcher._Run.start = _patient  # type: ignore[method-assign]
