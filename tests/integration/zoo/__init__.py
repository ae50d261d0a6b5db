"""Tiny instances of real architectures, and what must hold for each of them."""
