"""All places of a pattern in one graph, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_core.graph.patterns.data import Form
from slapo_core.graph.patterns.index import Indexed
from slapo_core.graph.patterns.matching import Embedding, FormMatcher

__all__ = ["embeddings"]


def embeddings(forms: Sequence[Form], index: Indexed) -> tuple[list[tuple[int, Embedding]], int]:
    """Where the forms of a pattern stand in a graph, none of them sharing a node with another.

    The first begins at the earliest possible node; of those that begin there, the one of the earliest form counts. The
    next begins at the earliest node that still leaves one, and so on.

    Returns:
        the number of the form and the place, for each; how many placements were tried, which is what it costs.
    """
    matchers = {number: FormMatcher(form, index) for number, form in enumerate(forms) if _may_be_there(form, index)}
    starts: dict[int, list[tuple[int, int]]] = {}
    for number, matcher in matchers.items():
        if matcher.is_possible:
            for position, step in matcher.starts():
                starts.setdefault(position, []).append((number, step))
    taken: set[int] = set()
    found = []
    for position in sorted(starts):
        if position in taken:
            continue
        for number, step in sorted(starts[position]):
            embedding = matchers[number].first_at(position, step, taken)
            if embedding is not None:
                taken.update(embedding.positions)
                found.append((number, embedding))
                break
    return found, sum(matcher.tried for matcher in matchers.values())


def _may_be_there(form: Form, index: Indexed) -> bool:
    """Whether the graph has each of the form's operations at all: what most forms of a long pattern end with."""
    return all(step.target.kind != "call" or step.target.name in index.by_operation for step in form.steps)
