"""Scheduled models trained by DeepSpeed on real ranks."""
