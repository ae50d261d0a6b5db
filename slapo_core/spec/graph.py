"""What one sees of the static graph of a traced module, and of what was found in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Graph", "Match", "Region"]

Region = Callable[..., Any]
"""What a match computes, as a pure function of its inputs: parameters and buffers are arguments like any other."""


@dataclass(frozen=True)
class Match:
    """A place in the graph of a traced module where a pattern was found.

    It holds as long as its nodes stand in the present graph of the module; then StaleMatchError names the step that
    ended it.

    Args:
        path: of the traced module, e.g. ``"encoder.layer.0.output"``.
        pattern: as data; finds the place again in another variant of the graph, or in another instance of the model.
        index: which of the matches in this graph it is, from 0.
        total: how many there are.
        nodes: names of the graph's nodes that belong to it, in the graph's order.
        inputs: names of the nodes whose values it reads, in the order of the pattern's arguments.
        outputs: names of those of its nodes whose values are used outside of it, in the graph's order.
        captures: by name: the name of a node, as :class:`str`, or ``("constant", value)``.
    """

    path: str
    pattern: Any
    index: int
    total: int
    nodes: tuple[str, ...] = field(default=(), compare=False)
    inputs: tuple[str, ...] = field(default=(), compare=False)
    outputs: tuple[str, ...] = field(default=(), compare=False)
    captures: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        where = f"'{self.path}'" if self.path else "the root"
        return f"match {self.index + 1} of {self.total} at {where}: {', '.join(self.nodes)}"


class Graph(Protocol):
    """The static graph that runs in place of a module's forward.

    It holds no module: names in it are relative to the one it is called for. ``print(graph)`` shows it as Python.
    Nothing changes it; what rewrites it makes another one, for :meth:`slapo_core.spec.edit.Edit.set_graph`.
    """

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run it as the forward of ``module``."""
        ...

    def __str__(self) -> str: ...
