"""With a pipeline: the stages of the schedule in Megatron's 1F1B and interleaved schedules."""
