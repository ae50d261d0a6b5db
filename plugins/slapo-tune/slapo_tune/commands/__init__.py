"""The commands of ``slapo tune``."""
