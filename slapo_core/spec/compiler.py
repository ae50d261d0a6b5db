"""The base class of the ``compilers`` kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Compiler"]


class Compiler(ABC):
    """A way to compile a module or subgraph.

    Attributes:
        name: what users write to select it.
    """

    name: ClassVar[str]

    @abstractmethod
    def compile(self, module: nn.Module, example_inputs: tuple[Any, ...]) -> nn.Module:
        """Compile ``module``.

        Args:
            module: what to compile.
            example_inputs: one set of positional inputs.

        Returns:
            a module that computes the same as ``module``.
        """
