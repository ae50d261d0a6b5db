"""Scheduled models trained by Megatron-core on real ranks."""
