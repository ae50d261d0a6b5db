"""Full schedules of model families: plain functions to import, read and copy."""

from slapo_models.schedules import bert, gpt, llama, opt, roberta, t5, wide_resnet

__all__ = ["bert", "gpt", "llama", "opt", "roberta", "t5", "wide_resnet"]
