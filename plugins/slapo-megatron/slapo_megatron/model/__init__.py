"""The scheduled model in the form in which Megatron takes one."""
