"""Static graphs rewritten: matches taken out of a graph, and calls put in their places, by making a new graph."""
