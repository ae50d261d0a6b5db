"""Checkpoints that every rank writes and reads in parallel, by the reference model's names."""

from slapo_runtime.checkpoints.on_signal import SaveOnSignal

__all__ = ["SaveOnSignal"]
