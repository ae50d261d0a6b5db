"""Read the user's options in Megatron's terms, and complete them."""
