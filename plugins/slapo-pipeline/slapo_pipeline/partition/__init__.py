"""Partition propagation: record the model once, and cut the flat graph after the marked modules."""
