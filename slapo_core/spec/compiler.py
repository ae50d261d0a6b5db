"""The base class of compilers of regions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from slapo_core.spec.graph import Region

__all__ = ["Compiler"]


class Compiler(ABC):
    """Makes something faster of a region of a graph: ``fuse(match, compiler="inductor")``.

    Attributes:
        name: what users write, e.g. ``"inductor"``.
        deprecated: why another one should be taken, shown as a warning; None if nothing speaks against it.
    """

    name: ClassVar[str]
    deprecated: ClassVar[str | None] = None

    @abstractmethod
    def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
        """A function that computes what ``region`` computes, gradients included.

        It is called with other sizes than the first ones too, in training and in evaluation.

        Args:
            region: takes tensors, numbers and modules, gives a tensor or a tuple of such.
            options: what the user gave to the compiler.
        """
