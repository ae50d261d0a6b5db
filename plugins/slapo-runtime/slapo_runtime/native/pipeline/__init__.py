"""Pipelines of the target ``"torch"``: the stages of a model under the schedules of torch.distributed.pipelining."""
