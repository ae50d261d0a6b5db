"""Processes: starting them, and making sure that all of them mean the same."""
