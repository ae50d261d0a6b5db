"""The function of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

__all__ = ["compiled"]


def compiled(graph: fx.Graph) -> Callable[..., Any]:
    """Make a function of a graph: of a module, in which it looks names up, and of the placeholders, in order."""
    module = fx.GraphModule({}, fx.Graph())
    module.graph = graph  # code without copies of what the names stand for, which may be held by plain objects
    return type(module).forward
