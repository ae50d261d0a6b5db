"""Lightning on a scheduled model: ``SlapoStrategy`` for its Trainer; :mod:`slapo_lightning.fabric` has Fabric's."""

from slapo_lightning.trainer import SlapoStrategy

__all__ = ["SlapoStrategy"]
