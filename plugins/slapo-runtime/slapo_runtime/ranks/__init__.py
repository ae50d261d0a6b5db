"""Launch ranks, and check their consistency."""
