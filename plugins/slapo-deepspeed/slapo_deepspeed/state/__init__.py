"""Where DeepSpeed keeps parameters and the optimizer's state, and how they are read and written whole."""
