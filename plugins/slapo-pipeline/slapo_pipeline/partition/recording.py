"""The one recording of which stages are made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from slapo_core.tracing import FlatGraph, flat

__all__ = ["ancestors", "recorded"]


def ancestors(paths: Collection[str]) -> frozenset[str]:
    """The paths of all modules above ``paths``; the root is ``""``."""
    return frozenset(path[:end] for path in paths for end in range(len(path)) if path[end] == ".") | {""}


def recorded(root: nn.Module, inputs: Mapping[str, Any], cuts: Collection[str]) -> FlatGraph:
    """The graph of the whole model, in which the modules above cuts are looked through, and all others called.

    Args:
        root: the scheduled model.
        inputs: by parameter of its forward.
        cuts: paths.

    Raises:
        TraceError: it cannot be recorded.
    """
    above = ancestors(cuts)
    with torch.enable_grad():
        return flat(root, type(root).forward, _told_apart(inputs), lambda module, path: path not in above)


def _told_apart(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """One tensor that is two arguments becomes two: the next batch may have different ones."""
    seen: set[int] = set()
    found = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and id(value) in seen:
            found[name] = value.detach().requires_grad_(value.requires_grad)
        else:
            found[name] = value
        seen.add(id(value))
    return found
