"""Pipeline stages for slapo: ``pipeline_split`` cuts any model, and two hooks make the stages.

Installing this distribution is enough: every schedule then knows ``sch["path"].pipeline_split()``. `PipelineSplit`
is the primitive as a value; ``print(slapo_pipeline.stages(sch))`` shows the stages of a schedule.
"""

from __future__ import annotations

from slapo_pipeline.split import PipelineSplit
from slapo_pipeline.view import Stages, stages

__all__ = ["PipelineSplit", "Stages", "stages"]
