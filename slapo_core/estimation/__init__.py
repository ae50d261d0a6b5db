"""Memory, communication and time of a training step, predicted on one process without the memory it takes."""

from slapo_core.estimation.estimates import estimate, estimate_functions, estimate_source
from slapo_core.estimation.results import Collective, Estimate, Memory, RankEstimate

__all__ = ["Collective", "Estimate", "Memory", "RankEstimate", "estimate", "estimate_functions", "estimate_source"]
