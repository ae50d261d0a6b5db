"""Matches and patterns, as users see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from slapo_core.errors import place

if TYPE_CHECKING:
    from slapo_core import Node

__all__ = ["Match", "Pattern", "Region", "by_place", "name_of"]


def name_of(path: str) -> str:
    """Return the path of a module for messages."""
    return place(path)


Region = Callable[..., Any]
"""The computation of a match, as a pure function of its inputs, parameters and buffers."""


@dataclass(frozen=True)
class Match:
    """A place in the graph of a traced module where a pattern was found.

    It is valid while its nodes are part of the present graph of the module; after that StaleError names the step
    that ended it.

    Args:
        path: of the traced module, e.g. ``"encoder.layer.0.output"``.
        pattern: as data; finds the place again in another variant of the graph, or in another instance of the model.
        index: its number among the matches in this graph, from 0.
        total: the number of matches in this graph.
        nodes: names of the graph's nodes that belong to it, in the graph's order.
        inputs: names of the nodes that it reads, in the order of the pattern's arguments.
        outputs: names of its nodes that are used outside of it, in the graph's order.
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
        return f"match {self.index + 1} of {self.total} at {name_of(self.path)}: {', '.join(self.nodes)}"


def by_place(node: Node, matches: Iterable[Match]) -> list[tuple[Node, list[Match]]]:
    """Return the traced nodes at or below ``node`` that hold the matches, each with its own.

    Args:
        node: where a primitive is applied.
        matches: of the primitive.
    """
    groups: dict[str, list[Match]] = {}
    for match in matches:
        groups.setdefault(match.path, []).append(match)
    prefix = f"{node.path}." if node.path else ""
    return [(node if path == node.path else node[path.removeprefix(prefix)], own) for path, own in groups.items()]


class Pattern(ABC):
    """A pattern with a name: ``sch.find("fusion.bias_gelu")``.

    The first line of the docstring is what ``slapo patterns list`` shows::

        class BiasGelu(slapo.Pattern):
            \"\"\"GELU of a sum with a bias.\"\"\"

            name = "fusion.bias_gelu"

            def alternatives(self):
                yield lambda x, bias: F.gelu(x + bias)
                yield lambda x, bias: F.gelu(x + bias, approximate="tanh")

    Attributes:
        name: the full name ``<namespace>.<name>``.
        replacement: a function that computes the same of the captures by name, for ``replace(match=...)`` without a
            new module; None if there is none. It must be right for every alternative.
        results_only: the replacement returns only the pattern's result. Inner values that the traced module returns
            without using them, e.g. attention weights, become None.
        computed_by: functions that compute it in one call. Where nothing matches, the refusal names the one that the
            graph calls, with ``hint``.
        hint: how to make a model that writes it out instead.
    """

    name: ClassVar[str]
    replacement: ClassVar[Callable[..., Any] | None] = None
    results_only: ClassVar[bool] = False
    computed_by: ClassVar[tuple[Callable[..., Any], ...]] = ()
    hint: ClassVar[str] = ""

    @abstractmethod
    def alternatives(self) -> Iterable[Any]:
        """Yield the spellings in models; each is anything that ``find`` takes, all with the same captures.

        Where two alternatives match, the earlier one is taken.
        """
