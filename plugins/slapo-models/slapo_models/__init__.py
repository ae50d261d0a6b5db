"""Full schedules of model families, plain functions to import, read and copy; and of any model: ``auto``."""

from slapo_models.auto import auto
from slapo_models.schedules import bert, gpt, llama, opt, roberta, t5, wide_resnet

__all__ = ["auto", "bert", "gpt", "llama", "opt", "roberta", "t5", "wide_resnet"]
