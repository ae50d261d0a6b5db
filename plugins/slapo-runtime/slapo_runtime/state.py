"""The state of a scheduled model, for dialects: a name of :mod:`slapo_runtime.weights.state`."""

from slapo_runtime.weights.live import live_state as live_state
from slapo_runtime.weights.state import ModelState as ModelState
