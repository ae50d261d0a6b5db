"""What slapo asks this plugin: the stages of a cut model, and what passes between them."""

from __future__ import annotations

from slapo_pipeline.liveness import slapo_liveness
from slapo_pipeline.partition.hook import slapo_partition

__all__ = ["slapo_liveness", "slapo_partition"]
