"""Run stages in Megatron's 1F1B and interleaved schedules."""
