"""Weights of a scheduled model: correspondence, initialization, state dicts, checkpoints."""
