"""``slapo pipeline draw``: a schedule of micro-batches over time, as torch orders it, and as a picture."""
