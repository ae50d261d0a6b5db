"""What the user says, in Megatron's own terms, and what is filled in."""
