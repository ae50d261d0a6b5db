"""Pipeline stages for slapo: ``pipeline_split`` cuts any model, and two hooks say what the stages are.

Installing this distribution is enough: every schedule then knows ``sch["path"].pipeline_split()``. The class below is
for those who build primitives as values; ``print(slapo_pipeline.stages(sch))`` shows the stages of a schedule.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slapo_pipeline.split import PipelineSplit
    from slapo_pipeline.view import Stages, stages

__all__ = ["PipelineSplit", "Stages", "stages"]

_HOMES = {
    "PipelineSplit": "slapo_pipeline.split",
    "Stages": "slapo_pipeline.view",
    "stages": "slapo_pipeline.view",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
