"""Without a pipeline: the whole model on every rank of a replica."""
