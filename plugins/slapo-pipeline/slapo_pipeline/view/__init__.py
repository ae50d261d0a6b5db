"""``slapo_pipeline.stages``: what the stages of a schedule are, to print and for scripts."""
