"""Where ``pipeline_split(stages=N)`` cuts: the cost of each block, and the best cuts."""
