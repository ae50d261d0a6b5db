"""Random numbers in code that asks Megatron for a state of its own."""
