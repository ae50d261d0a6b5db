"""Weights: which tensor stands for which reference tensor; initializing, loading, and the reference model's layout."""
