"""Weights: which tensor stands for which untouched one; initializing, loading, and the untouched model's layout."""
