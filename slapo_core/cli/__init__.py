"""The command ``slapo``."""
