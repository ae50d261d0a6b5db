"""The small model of all dialects, built for DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import slapo_core as slapo
from tests.support import tied_model
from tests.support.tied_model import CLIP, Tied, adamw, batch, make, share, split, trained

__all__ = ["CLIP", "Tied", "adamw", "batch", "built", "make", "share", "split", "trained"]


def built(
    mesh: Mapping[str, int] | None, config: Mapping[str, Any] | None = None, **options: Any
) -> tuple[slapo.Schedule, Any]:
    """As there, with DeepSpeed's configuration; without one, by target torch."""
    if config is not None:
        options = {"target": "deepspeed", "config": dict(config), **options}
    return tied_model.built(mesh, **options)
