"""Megatron's process groups, those of our mesh."""
