"""Weights, optimizer state and checkpoints, out of where Megatron keeps them."""
