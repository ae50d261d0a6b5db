"""Scheduled models trained by DeepSpeed on real ranks, and what they are held against."""
