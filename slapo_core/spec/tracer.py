"""The base class of the ``tracers`` kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import nn
    from torch.fx import GraphModule

__all__ = ["Tracer"]


class Tracer(ABC):
    """A way to get a static graph of a module.

    Attributes:
        name: what users write to select it.
    """

    name: ClassVar[str]

    @abstractmethod
    def trace(self, module: nn.Module, *, leaves: tuple[str, ...] = (), flatten: bool = False) -> GraphModule:
        """Trace the forward of ``module``.

        Args:
            module: the module whose forward becomes a graph.
            leaves: types or paths of submodules that stay calls.
            flatten: whether calls of other submodules are inlined.

        Returns:
            a graph module that computes the same as ``module``.
        """
