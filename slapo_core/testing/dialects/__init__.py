"""The kit for dialects: what to train, with what, and what must come of it."""
