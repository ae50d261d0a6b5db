"""Nodes over the live module tree, and `Edit` with its journal: the only code that mutates a model."""
