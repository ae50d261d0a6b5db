"""Weights: which tensor stands for which untouched one; initialising, loading, and the untouched model's layout."""
