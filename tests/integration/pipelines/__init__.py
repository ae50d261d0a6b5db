"""Cut models on real ranks, and what they are held against."""
