"""Journal entries: one class per way of changing a model, each able to undo and redo itself exactly."""

from __future__ import annotations

from slapo_core.tree.journal.calls import AddHook, SetGraph, WrapForward
from slapo_core.tree.journal.entry import Entry
from slapo_core.tree.journal.modules import AddModule, ReplaceModule, SetAttribute
from slapo_core.tree.journal.tensors import Annotate, SetLayout, SetRequiresGrad, SetTensor

__all__ = [
    "AddHook",
    "AddModule",
    "Annotate",
    "Entry",
    "ReplaceModule",
    "SetAttribute",
    "SetGraph",
    "SetLayout",
    "SetRequiresGrad",
    "SetTensor",
    "WrapForward",
]
