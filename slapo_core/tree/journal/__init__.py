"""The journal: entries for each way to change a model, with exact undo and redo."""

from slapo_core.tree.assignment import Assignment, TakenHook
from slapo_core.tree.journal.calls import AddHook, SetForward, SetState, WrapForward
from slapo_core.tree.journal.entry import JournalEntry
from slapo_core.tree.journal.modules import AddModule, ReplaceModule, SetAttribute
from slapo_core.tree.journal.tensors import AnnotateParameter, SetLayout, SetRequiresGrad, SetTensor

__all__ = [
    "AddHook",
    "AddModule",
    "AnnotateParameter",
    "Assignment",
    "JournalEntry",
    "ReplaceModule",
    "SetAttribute",
    "SetForward",
    "SetLayout",
    "SetRequiresGrad",
    "SetState",
    "SetTensor",
    "TakenHook",
    "WrapForward",
]
