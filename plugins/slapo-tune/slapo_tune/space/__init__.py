"""A symbolic space, defined by running a function."""
