"""Which point is tried next: pure functions of the space, the history and a seed."""
