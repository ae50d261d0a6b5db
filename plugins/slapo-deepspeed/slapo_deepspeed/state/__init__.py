"""Read and write weights, optimizer state and checkpoints under DeepSpeed."""
