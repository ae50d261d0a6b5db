"""Records the forward of a module as a graph, by one run on fake tensors."""
