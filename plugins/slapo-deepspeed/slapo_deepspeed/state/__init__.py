"""Where DeepSpeed keeps parameters and the optimiser's state, and how they are read and written whole."""
