"""With a pipeline: the stages of the schedule in DeepSpeed's PipelineModule and PipelineEngine."""
