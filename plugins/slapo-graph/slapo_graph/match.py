"""What one sees of the static graph of a traced module, and of what was found in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import nn

    from slapo_core import Node

__all__ = ["Graph", "Match", "Pattern", "Region", "by_place"]

Region = Callable[..., Any]
"""What a match computes, as a pure function of its inputs: parameters and buffers are arguments like any other."""


@dataclass(frozen=True)
class Match:
    """A place in the graph of a traced module where a pattern was found.

    It is valid while its nodes are part of the present graph of the module; after that StaleError names the step
    that ended it.

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


def by_place(node: Node, matches: Iterable[Match]) -> list[tuple[Node, list[Match]]]:
    """The traced nodes at or below ``node`` in which the matches lie, each with its own.

    Args:
        node: where a primitive is applied.
        matches: what its field of matches holds then.
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

            def forms(self):
                yield lambda x, bias: F.gelu(x + bias)
                yield lambda x, bias: F.gelu(x + bias, approximate="tanh")

    Attributes:
        name: the full name ``<namespace>.<name>``.
        replacement: what computes the same, called with the captures by name, for ``replace(match=...)`` without a new
            module; None if there is none. It must be right for every form.
        results_only: the replacement gives what the pattern returns, and no value inside of a match: one that the
            traced module gives out and does not use, such as the weights of an attention, is None then.
    """

    name: ClassVar[str]
    replacement: ClassVar[Callable[..., Any] | None] = None
    results_only: ClassVar[bool] = False

    @abstractmethod
    def forms(self) -> Iterable[Any]:
        """The ways in which models write it; each is anything that ``find`` takes, all with the same captures.

        Of two forms that match at one place, the earlier one counts.
        """


class Graph(Protocol):
    """The static graph that runs in place of a module's forward.

    It holds no module: names in it are relative to the one it is called for. ``print(graph)`` shows it as Python to
    read, where a value may have the name of the function that gives it; names are those of error messages.
    Nothing changes it; what rewrites it makes another one, for :meth:`slapo_core.tree.edit.Edit.set_forward`.
    """

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run it as the forward of ``module``."""
        ...

    def __str__(self) -> str: ...

    def look(self, module: nn.Module) -> None:
        """Have what was recorded of the module as it is now stand for all variants, if there is such a recording."""
        ...

    def follow(
        self, module: nn.Module, calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]] = ()
    ) -> tuple[str, ...]:
        """Record again what steps have changed at modules below the traced one.

        Args:
            module: the traced module.
            calls: what it may be called with now, if not with what it was recorded with.

        Returns:
            paths, relative to the traced module, of modules that the graph called before it was rewritten, and calls
            no more. Their parameters may be in use; what is put around their calls has no effect.

        Raises:
            TraceError: what was done to the graph cannot be repeated then.
        """
        ...

    def opened(
        self, below: str, child: nn.Module, call: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> Graph | None:
        """A graph for a module below whose code is part of this one, to run within what is put around it now.

        Args:
            below: its path, relative to the traced module.
            child: the module.
            call: gives what it is called with.

        Returns:
            its graph; None if its code is not part of this one, or cannot be recorded by itself.
        """
        ...

    def parted(self, module: nn.Module, inner: Any, child: nn.Module) -> tuple[Graph, Graph] | None:
        """This graph with a call in the place of a module's code, and ``inner``, both rewritten as this one is.

        Args:
            module: the traced one.
            inner: of :meth:`opened`.
            child: the module of ``inner``.

        Returns:
            both; None where a rewrite cannot be repeated so.
        """
        ...

    @property
    def node_names(self) -> frozenset[str]:
        """Of the variant that stands for all, which matches are named after."""
        ...

    def outlined(
        self, module: nn.Module, matches: Sequence[Match], transform: Callable[[Region], Region], *, name: str
    ) -> Graph:
        """Each match becomes one call of ``transform(region)``, in every variant of the graph.

        Args:
            module: the traced module.
            matches: of this graph, none of which shares a node with another.
            transform: gives what runs instead of a region; called once for each distinct region, which all places
                that compute the same then share. To pickle the model, it must be picklable.
            name: of the call in the printed graph.

        Raises:
            ApplyError: a match cannot be taken out: a value leaves it and comes back, a tensor is written to in place
                between its nodes, or random numbers would be drawn in another order. Modules with hooks or steps are
                called by the region as before.
        """
        ...

    def replaced(
        self,
        module: nn.Module,
        matches: Sequence[Match],
        new: Callable[..., Any] | str,
        *,
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
        name: str,
        results: Sequence[str] = (),
        results_only: bool = False,
        then: Callable[..., Any] | None = None,
        undone: Callable[[nn.Module], AbstractContextManager[None]] | None = None,
    ) -> Graph:
        """Each match becomes one call of ``new``, in every variant of the graph.

        Args:
            module: the traced module.
            matches: as for :meth:`outlined`.
            new: a function, or the path of a module below the traced one.
            arguments: names of captures of the match, or numbers of its inputs, whose values are passed in this order.
            keywords: the same, by keyword.
            name: of the call in the printed graph.
            results: names of captures of the match for which the results stand, in their order; empty: the values that
                are used outside of the match, in the graph's order.
            results_only: ``new`` gives the last value of a match; others become None where the traced module gives
                them out, and are refused where it uses them.
            then: called with what ``new`` gives, and gives the results.
            undone: gives, for the traced module, a context in which what the matches call can run, for recording
                another variant; None: it always can.

        Raises:
            ApplyError: as for :meth:`outlined`; or a match has no such capture, or it swallows a module with hooks or
                steps.
        """
        ...
