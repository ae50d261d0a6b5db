"""The names of :mod:`slapo_runtime.stages.runner` that plugins also import from here."""

from slapo_runtime.stages.runner import (
    RankStages as RankStages,
    StageCache as StageCache,
    Work as Work,
    advance as advance,
    start_stream as start_stream,
    step_seed as step_seed,
    was_used as was_used,
)
