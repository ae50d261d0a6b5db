"""Look into a checkpoint: its full tensors, its description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slapo_core.layout import Layout
from slapo_runtime.checkpoints.manifest import Manifest, newest_checkpoint
from slapo_runtime.weights.checkpoint_source import CheckpointSource, Part

__all__ = ["described", "newest", "stored"]


def newest(directory: Path) -> Path:
    """The newest complete checkpoint among the steps."""
    found = newest_checkpoint(directory)
    assert found is not None
    return found


def stored(directory: Path, part: Part = "model") -> dict[str, torch.Tensor]:
    """The full tensors of one part of the newest checkpoint."""
    source = CheckpointSource(newest(directory), part)
    return {name: source.read(name, Layout(name, shape), None) for name, shape in source.shapes().items()}


def described(directory: Path) -> Any:
    """The description in the newest checkpoint."""
    return Manifest.read(newest(directory)).description
