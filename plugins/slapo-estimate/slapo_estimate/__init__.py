"""Memory, communication and time of a training step, predicted on one process without the memory it takes."""

from slapo_estimate.estimates import estimate, estimate_functions, estimate_source
from slapo_estimate.results import Collective, Estimate, Memory, RankEstimate

__all__ = ["Collective", "Estimate", "Memory", "RankEstimate", "estimate", "estimate_functions", "estimate_source"]
