"""``merge``: parallel projections of one input become one."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core import Edit, Node
from slapo_core.primitive import Equivalence, Primitive, Violation
from slapo_graph.graph import graph_of
from slapo_graph.match import Match
from slapo_graph.primitives.match_replacement import changes_lost
from slapo_graph.primitives.merged_linear import MergedFrom, Parts, PartsBack, tensor_violations

if TYPE_CHECKING:
    from torch import nn

    from slapo_core import Effect
    from slapo_graph.patterns.pattern import GraphPattern


@dataclass(frozen=True)
class Merge(Primitive):
    """Merge several nn.Linear of one input into one, e.g. query, key and value.

    The new child concatenates their weights and biases; the graph splits its output. State dicts keep the reference
    names. The old modules stay at their paths, without parameters, and are not called.

    Unlike with ``replace``, parameters and outputs are split at the same places, and the record holds names only, so
    that it can be saved.

    Args:
        linears: paths of the modules, relative to the traced one, e.g. ``("query", "key", "value")``; of any sizes, all
            with a bias or all without.
        name: of the new child; None joins theirs: ``"query_key_value"``.

    Raises:
        PreconditionError: the module is not traced; it does not call each of them with the same value; one is not
            an nn.Linear, is sharded, tied, or changed by steps.
        ApplyError: the calls cannot become one.

    rewrite:
        ``q, k, v = x wq^T, x wk^T, x wv^T`` -> ``q, k, v = split(x w^T)``, ``w = cat(wq, wk, wv)``

    Split it afterwards by ``shard("weight", axis=0, packed=(q, k, v))``, with the rows of each.

    Source: paper section 2.2, the fused query-key-value projection; ``torch/nn/modules/linear.py``.
    """

    name = "graph.merge"
    equivalence = Equivalence.REORDERED

    linears: tuple[str, ...]
    name_: str | None = None

    @property
    def child(self) -> str:
        """Return the name of the new child."""
        return self.name_ or "_".join(path.rpartition(".")[2] for path in self.linears)

    def preconditions(self, node: Node) -> Iterator[Violation]:
        graph = graph_of(node)
        if graph is None:
            yield Violation("the module is not traced", f"sch['{node.path}'].trace() first")
            return
        if len(self.linears) < 2 or len(set(self.linears)) < len(self.linears):
            yield Violation(
                f"linears must name two or more modules, each once (got {self.linears!r})", '("query", "key", "value")'
            )
            return
        if not self.child.isidentifier() or hasattr(node.module, self.child):
            yield Violation(f"there cannot be a new child '{self.child}'", "take another name=")
        parts = Parts.of(node, self.linears)
        if isinstance(parts, Violation):
            yield parts
            return
        matches = self._matches(node)
        if not matches:
            miss = self._pattern().nearest_miss(graph.fx_graph, node.module)
            yield Violation(
                f"the graph does not call {', '.join(map(repr, self.linears))} with one and the same value"
                + (f"; closest candidate: {miss}" if miss else ""),
                f"print(sch['{node.path}'].graph) shows its calls",
            )
        for match in matches:
            yield from changes_lost(node, match)
        yield from tensor_violations(parts)

    def apply(self, node: Node, edit: Edit) -> None:
        parts = Parts.of(node, self.linears)
        assert isinstance(parts, Parts)  # or the preconditions had refused it
        matches = self._matches(node)
        edit.add_module(node, self.child, parts.merged())
        graph: Any = graph_of(node)
        rewritten = graph.replaced(
            node.module,
            matches,
            self.child,
            arguments=("x",),
            name=self.child,
            results=[f"part_{number}" for number in range(len(self.linears))],
            then=parts.split,
            undone=PartsBack(self.child, self.linears, parts.names, parts.sizes),
        )
        for own in parts.names:
            for part in parts.nodes:
                edit.set_parameter(part, own, None)
        edit.set_forward(node, rewritten)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if not isinstance(getattr(node[self.child].module, "merged_from", None), MergedFrom):
            yield Violation(f"'{self.child}' is not there")

    def effects(self, node: Node) -> Iterator[Effect]:
        graph = graph_of(node)
        if graph is not None:
            yield from graph.effects([self._pattern()], node)

    def _matches(self, node: Node) -> list[Match]:
        pattern = self._pattern()
        graph: Any = graph_of(node)
        count = len(pattern.matches(graph.fx_graph, node.module))
        return [Match(node.path, pattern, index, count) for index in range(count)]

    def _pattern(self) -> GraphPattern:
        from slapo_graph.patterns.definition import pattern_of
        from slapo_graph.patterns.vocabulary import call_module, capture

        def parallel(x: nn.Module) -> Any:
            return tuple(
                capture(f"part_{number}", call_module(glob.escape(path), x)) for number, path in enumerate(self.linears)
            )

        return pattern_of(parallel)
