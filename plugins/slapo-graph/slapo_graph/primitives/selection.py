"""Matches as fields of primitives, located in the present graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slapo_core.errors import StaleError, TraceError
from slapo_core.internals import Internals, journal
from slapo_core.primitive import Selection, Selector, Violation
from slapo_graph.graph import graph_of
from slapo_graph.match import Match, by_place, name_of
from slapo_graph.patterns.definition import pattern_of
from slapo_graph.primitives.find import find_in, first_graph, how_to_open, how_to_search, load_pattern, matches_at
from slapo_graph.primitives.match_replacement import MatchReplacement

if TYPE_CHECKING:
    from torch import nn

    from slapo_core import Edit, Effect, Node, Schedule
    from slapo_core.primitive import Record
    from slapo_graph.patterns.pattern import GraphPattern


class SelectedMatches(tuple[Match, ...], Selection):
    """Matches at or below the node of a primitive."""

    __slots__ = ()

    def located(self, node: Node) -> Selection | Violation:
        """Locate each match in the present graph of its module.

        Raises:
            StaleError: a match is gone; the message names the step that changed its graph.
        """
        located: list[Match] = []
        used: dict[tuple[str, str], Match] = {}
        for match in self:
            if not _lies_at(match, node):
                return Violation(
                    f"{match} is not at or below this node",
                    f"apply it at {name_of(match.path)}, or at a common parent",
                )
            again = _located(match, node.schedule)
            for each in again.nodes:
                other = used.setdefault((again.path, each), again)
                if other is not again:
                    return Violation(f"{again} and {other} share the node '{each}'", "give one of them")
            located.append(again)
        return SelectedMatches(located)

    def divided(self, nodes: Sequence[Node]) -> list[tuple[Node, Selection]] | Violation:
        """Divide the matches among nodes: each belongs to the first node at or above it."""
        parts: list[tuple[Node, Selection]] = []
        left = {id(match): match for match in self}
        for node in nodes:
            own = SelectedMatches(each for each in self if id(each) in left and _lies_at(each, node))
            for each in own:
                left.pop(id(each), None)
            if own:
                parts.append((node, own))
        if left:
            return Violation(f"{next(iter(left.values()))} lies at none of the {len(nodes)} nodes")
        return parts

    def outline(
        self, node: Node, edit: Edit, transform: Callable[[Callable[..., Any]], Callable[..., Any]], *, name: str
    ) -> None:
        """Make each match one call of ``transform(region)`` in the graph of its module."""
        for place, matches in by_place(node, self):
            graph: Any = graph_of(place)
            edit.set_forward(place, graph.with_region_called(place.module, matches, transform, name=name))

    def replacement_violations(
        self, node: Node, new: Any, *, params: Mapping[str, str], name: str | None
    ) -> Iterator[Violation]:
        """Yield everything that speaks against calling ``new`` instead of each match."""
        return MatchReplacement(node, new, self, dict(params), name).violations()

    def replace(self, node: Node, edit: Edit, new: Any, *, params: Mapping[str, str], name: str | None) -> None:
        """Call ``new`` instead of each match."""
        MatchReplacement(node, new, self, dict(params), name).apply(edit)

    def effects(self, node: Node) -> Iterator[Effect]:
        """Yield the calls in the place of the matches, in the present graphs."""
        for place, matches in by_place(node, self):
            graph = graph_of(place)
            if graph is not None:
                yield from graph.effects([match.pattern for match in matches], place)

    def __repr__(self) -> str:
        patterns = dict.fromkeys(str(each.pattern) for each in self)
        return f"<{len(self)} {'match' if len(self) == 1 else 'matches'} of {' and '.join(patterns)}>"

    __str__ = __repr__


class MatchSelector(Selector):
    """Takes matches, lists of them, and patterns as ``find`` does."""

    name = "matches"

    def given(self, value: Any) -> Selection | None:
        """Return matches that were given; None for a pattern."""
        if isinstance(value, Match):
            return SelectedMatches((value,))
        if isinstance(value, tuple | list) and value and all(isinstance(each, Match) for each in value):
            return SelectedMatches(value)
        return None

    def select(self, node: Node, value: Any) -> Selection | Violation | None:
        """Find a pattern in the graphs at and below ``node``.

        Raises:
            ArgumentError: it is not a pattern, or one that cannot be traced.
        """
        schedule = node.schedule
        pattern = pattern_of(value, lambda named: load_pattern(Internals(schedule).registry, named))
        try:
            found = find_in(schedule, (node,), pattern)
        except TraceError as error:
            return Violation(error.message, error.hint)
        if found:
            return SelectedMatches(found)
        miss = _nearest_miss(pattern, node)
        nearest = f"; closest candidate: {miss}" if miss else ""
        is_traced = graph_of(node) is not None
        shown = f"print(sch[{node.path!r}].graph)" if is_traced else "print(node.graph) of a traced node"
        hint = f"{shown} shows the calls of the graph"
        if found.expression is not None:
            hint = how_to_search(found.expression)
        elif found.closed or found.hooked:
            hint = how_to_open(found.closed, found.hooked)
        named = f"the pattern {value!r}" if isinstance(value, str) else "the pattern"
        plugin = load_pattern(Internals(schedule).registry, value) if isinstance(value, str) else None
        if plugin is not None and (present := _called(plugin.computed_by, node)) is not None:
            return Violation(f"no match for {named}: the graph calls {present.__name__} itself", plugin.hint or hint)
        return Violation(f"no match for {named}{nearest}", hint)


def _located(match: Match, schedule: Schedule) -> Match:
    """Locate a match in the present graph.

    By the names of its nodes; a match of another instance of the model, or of a saved schedule, by its number.
    """
    node = Internals(schedule).node(match.path)
    if graph_of(node) is None:
        raise StaleError(
            f"{match} is not there: {name_of(match.path)} is no longer traced: its trace was undone",
            path=match.path,
            hint=f"sch[{match.path!r}].trace(), and find the pattern again",
        )
    present = matches_at(node, match.pattern)
    for each in present:
        if match.nodes and each.nodes == match.nodes:
            return each
    step = _rewrite_of(schedule, node.module, match.nodes) if match.nodes else None
    if step is not None:
        raise StaleError(
            f"{match} is not there any more: {step}, at {step.location}, changed that part of the graph",
            path=match.path,
            hint=f"find the pattern again after that step, or undo it: sch.undo(to={step.index - 1})",
        )
    if len(present) == match.total:
        return present[match.index]
    raise StaleError(
        f"{match} is not there: the pattern matched {match.total} places at {name_of(match.path)} when it was "
        f"found, and matches {len(present)} now",
        path=match.path,
        hint="find the pattern again",
    )


def _called(functions: Collection[Callable[..., Any]], node: Node) -> Callable[..., Any] | None:
    """Return the first of the functions that a graph at or below ``node`` calls; None if none does."""
    traced = (each for each in node.walk() if functions and graph_of(each) is not None)
    calls = {call.target for each in traced for call in first_graph(each).nodes if call.op == "call_function"}
    return next((each for each in functions if each in calls), None)


def _nearest_miss(pattern: GraphPattern, node: Node) -> str | None:
    traced = (each for each in node.walk() if graph_of(each) is not None)
    misses = (pattern.nearest_miss(first_graph(each), each.module) for each in traced)
    return next(filter(None, misses), None)


def _rewrite_of(schedule: Schedule, module: nn.Module, nodes: Collection[str]) -> Record | None:
    """Return the step that removed one of these nodes from the module's graph; None if none did."""
    wanted = set(nodes)
    for record, entry in reversed(list(Internals(schedule).entries())):
        if isinstance(entry, journal.SetForward) and entry.module is module and entry.old is not None:
            names: list[frozenset[str]] = [getattr(each, "node_names", frozenset()) for each in (entry.old, entry.new)]
            if wanted <= names[0] and not wanted <= names[1]:
                return record
    return None


def _lies_at(match: Match, node: Node) -> bool:
    return not node.path or match.path == node.path or match.path.startswith(f"{node.path}.")
