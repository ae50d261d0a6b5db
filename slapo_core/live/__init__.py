"""Training a scheduled model in a loop of one's own: clipping, state dicts and export of the whole model."""
