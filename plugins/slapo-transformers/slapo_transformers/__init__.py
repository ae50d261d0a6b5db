"""Train scheduled models by transformers' Trainer, TRL's trainers and accelerate."""

from slapo_transformers.accelerators import prepare as prepare
from slapo_transformers.trainer import ScheduledTrainerMixin as ScheduledTrainerMixin, SlapoTrainer as SlapoTrainer

__all__ = ["ScheduledTrainerMixin", "SlapoTrainer", "prepare"]
