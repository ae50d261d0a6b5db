"""Primitives on graphs: trace, find, replace a match, merge."""
