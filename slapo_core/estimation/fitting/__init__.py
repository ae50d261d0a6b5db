"""`fit`: what to checkpoint so that a training step stays within a number of bytes."""

from slapo_core.estimation.fitting.fitting import fit
from slapo_core.estimation.fitting.result import Fit, Point

__all__ = ["Fit", "Point", "fit"]
