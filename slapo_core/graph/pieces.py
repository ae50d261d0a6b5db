"""Into how many parts a value is taken apart: a decision of the recorded code, held by a guard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.graph.structure import concrete

if TYPE_CHECKING:
    from torch import fx

    from slapo_core.graph.recording import Recording

__all__ = ["guard_pieces", "guard_structure", "structure_of"]

_CUT = {"split": "split_size", "chunk": "chunks", "unsafe_split": "split_size", "unsafe_chunk": "chunks", "unbind": ""}


def guard_pieces(recording: Recording, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Where ``func`` cuts a tensor into as many parts as its size makes, keep their number.

    The guard asks the tensor that is cut, and not the parts, which only the code that was recorded uses.
    """
    name = getattr(func, "__name__", "")
    if name not in _CUT:
        return
    given = dict(zip(("tensor", *filter(None, (_CUT[name],)), "dim"), args, strict=False)) | dict(kwargs)
    tensor = given.get("tensor", given.get("input", given.get("self")))
    if not isinstance(tensor, torch.Tensor):
        return
    by = given.get(_CUT[name], given.get("split_size_or_sections"))
    if isinstance(by, tuple | list):
        return  # given one by one
    dim = int(concrete(given.get("dim", 0)))
    length = recording.length(tensor, dim)
    if name.endswith("chunk"):
        by = -(-length // by)
        if int(concrete(length)) == 0:
            by = 1
    pieces = length if name == "unbind" else -(-length // by)
    recording.guard(getattr(pieces.node, "node", None), int(concrete(pieces)))


def structure_of(value: Any) -> Any:
    """The kind of a result of several parts, and which: ``("tuple", 2)``, ``("dict", ("hidden", "weights"))``."""
    if isinstance(value, Mapping):
        return type(value).__name__, tuple(value)
    return type(value).__name__, len(value) if isinstance(value, tuple | list) else None


def guard_structure(recording: Recording, value: Any, node: fx.Node) -> None:
    """Keep the structure of a result that a module may give otherwise at another call."""
    if isinstance(value, tuple | list | Mapping):
        recording.guard(recording.compute(structure_of, (node,)), structure_of(value))
