"""The names of :mod:`slapo_runtime.stages.partition` that plugins also import from here."""

from slapo_runtime.stages.partition import (
    Liveness as Liveness,
    Output as Output,
    Partition as Partition,
    Stage as Stage,
    StageModule as StageModule,
    Tie as Tie,
    Value as Value,
)
