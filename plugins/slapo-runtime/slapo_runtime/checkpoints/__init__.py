"""Checkpoints that every rank writes and reads in parallel, by the reference model's names."""
