"""Training and evaluation mode of modules that come into a model."""

from __future__ import annotations

from slapo_core.spec.edit import Edit
from slapo_core.spec.node import Node

__all__ = ["set_mode"]


def set_mode(node: Node, edit: Edit, training: bool) -> None:
    """Let a module and all below it be in the mode of the place where it stands now."""
    for below in node.walk():
        if below.module.training != training:
            edit.set_attribute(below, "training", training)
