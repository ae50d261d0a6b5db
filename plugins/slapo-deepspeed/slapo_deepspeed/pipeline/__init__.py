"""Run stages in DeepSpeed's PipelineModule and PipelineEngine."""
