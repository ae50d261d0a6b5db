"""Full schedules of model families, plain functions to import, read and copy; and of any model: ``auto``."""

from slapo_models.auto import auto
from slapo_models.decoders import gemma2, gemma3, gpt, llama, mistral, opt, qwen3
from slapo_models.encoders import bert, roberta, t5
from slapo_models.families import schedule_for
from slapo_models.mixtures import mixtral, qwen3_moe
from slapo_models.vision import vit, wide_resnet

__all__ = [
    "auto",
    "bert",
    "gemma2",
    "gemma3",
    "gpt",
    "llama",
    "mistral",
    "mixtral",
    "opt",
    "qwen3",
    "qwen3_moe",
    "roberta",
    "schedule_for",
    "t5",
    "vit",
    "wide_resnet",
]
