"""``slapo tune``."""
