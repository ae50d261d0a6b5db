"""Patterns of calls in a static graph: writing them, keeping them as data, and finding where they match."""
