"""What one sees of the static graph of a traced module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Graph"]


class Graph(Protocol):
    """The static graph that runs in place of a module's forward.

    It holds no module: names in it are relative to the one it is called for. ``print(graph)`` shows it as Python.
    """

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run it as the forward of ``module``."""
        ...

    def __str__(self) -> str: ...
