"""The state of a scheduled model, for dialects and hosts: names of :mod:`slapo_runtime.weights`."""

from slapo_runtime.weights.live import gather_full_matrices as gather_full_matrices, live_state as live_state
from slapo_runtime.weights.state import ModelState as ModelState
