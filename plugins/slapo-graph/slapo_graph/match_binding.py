"""Bind a primitive's matches before it is applied: find its patterns, and locate its matches again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ApplyError, PreconditionError, SlapoError, StaleError, TraceError
from slapo_core.primitive import Violation
from slapo_graph.finding import find_in, first_graph, how_to_open, how_to_search, load_pattern, matches_at
from slapo_graph.match import Match

if TYPE_CHECKING:
    from slapo_core.primitive import Primitive
    from slapo_core.schedule.history import History
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.tree.node import Node
    from slapo_graph.patterns.pattern import GraphPattern


def settled(primitive: Primitive, node: Node, schedule: Schedule, history: History) -> Primitive:
    """Return ``primitive`` with every match located in the present graphs; itself if it has none.

    Args:
        primitive: to be applied.
        node: where to apply it.
        schedule: that both belong to.
        history: of the schedule; says which step changed a graph.

    Raises:
        PreconditionError: a pattern matches nothing, or a match does not lie at ``node`` or below it.
        StaleError: a match is gone.
    """
    made: Primitive | None = None
    for name in primitive.matches:
        value = getattr(primitive, name)
        if value is None:
            continue
        matches = tuple(_found(primitive, name, value, node, schedule, history))
        made = made or copy.copy(primitive)
        object.__setattr__(made, name, matches)
    return made or primitive


def found_out(primitive: Primitive, node: Node) -> Primitive:
    """Call the primitive's own ``settle``.

    Raises:
        ApplyError: it raised, or returned something other than a primitive of its class.
    """
    try:
        made = primitive.settle(node)
    except SlapoError:
        raise
    except Exception as error:
        raise ApplyError(
            f"the settle of {primitive} at {_where(node.path)} raised {type(error).__name__}: {error}", path=node.path
        ) from error
    if type(made) is not type(primitive):
        raise ApplyError(
            f"the settle of {primitive} must return a {type(primitive).__name__} (got {made!r})", path=node.path
        )
    return made


def each_its_own(primitive: Primitive, nodes: Sequence[Node]) -> list[tuple[Node, Primitive]]:
    """Divide a primitive over a group: matches to the nodes they belong to, patterns to every node.

    A node at or below which none of the given matches lies is left out.

    Raises:
        PreconditionError: a match lies at none of the nodes.
    """
    given = {name: _as_matches(getattr(primitive, name)) for name in primitive.matches}
    given = {name: matches for name, matches in given.items() if matches is not None}
    if not any(given.values()):  # none are given, or an empty list, which every node refuses
        return [(node, primitive) for node in nodes]
    applied = []
    left = {id(match): match for matches in given.values() for match in matches or ()}
    for node in nodes:
        own = {
            name: tuple(each for each in matches or () if id(each) in left and _lies_at(each, node))
            for name, matches in given.items()
        }
        if not any(own.values()):
            continue
        for matches in own.values():
            for each in matches:
                left.pop(id(each), None)
        made = copy.copy(primitive)
        for name, matches in own.items():
            object.__setattr__(made, name, matches)
        applied.append((node, made))
    if left:
        raise _refusal(primitive, nodes[0], f"{next(iter(left.values()))} lies at none of the {len(nodes)} nodes")
    return applied


def _found(
    primitive: Primitive, name: str, value: Any, node: Node, schedule: Schedule, history: History
) -> Iterable[Match]:
    from slapo_graph.patterns.definition import pattern_of

    matches = _as_matches(value)
    if matches is None:
        pattern = pattern_of(value, lambda named: load_pattern(schedule.registry, named))
        try:
            found = find_in(schedule, (node,), pattern)
        except TraceError as error:
            raise _refusal(primitive, node, f"{name}: {error.message}", error.hint) from error
        if not found:
            miss = _nearest_miss(pattern, node)
            nearest = f"; closest candidate: {miss}" if miss else ""
            shown = (
                f"print(sch[{node.path!r}].graph)" if node.graph is not None else "print(node.graph) of a traced node"
            )
            closed = f"{shown} shows the calls of the graph"
            if found.expression is not None:
                closed = how_to_search(found.expression)
            elif found.closed or found.hooked:
                closed = how_to_open(found.closed, found.hooked)
            named = f"the pattern {value!r}" if isinstance(value, str) else "the pattern"
            raise _refusal(primitive, node, f"{name}: no match for {named}{nearest}", closed)
        return list(found)
    if not matches:
        raise _refusal(primitive, node, f"{name} is an empty list of matches", "give what find() found, or a pattern")
    located: list[Match] = []
    used: dict[tuple[str, str], Match] = {}
    for match in matches:
        if not _lies_at(match, node):
            raise _refusal(
                primitive,
                node,
                f"{match} is not at or below this node",
                f"apply it at {_where(match.path)}, or at a common parent",
            )
        again = _located(match, schedule, history)
        for each in again.nodes:
            other = used.setdefault((again.path, each), again)
            if other is not again:
                raise _refusal(primitive, node, f"{again} and {other} share the node '{each}'", "give one of them")
        located.append(again)
    return located


def _located(match: Match, schedule: Schedule, history: History) -> Match:
    """Locate a match in the present graph.

    By the names of its nodes; or, where this schedule never had them (a match of another instance of the model, or of
    a saved schedule), by its number.
    """
    node = schedule.tree.node(match.path)
    graph = node.graph
    if graph is None:
        raise StaleError(
            f"{match} is not there: {_where(match.path)} is not traced any more, its trace was undone",
            path=match.path,
            hint="trace it again, and find the pattern again",
        )
    present = matches_at(node, match.pattern)
    for each in present:
        if match.nodes and each.nodes == match.nodes:
            return each
    step = history.rewrite_of(node.module, match.nodes) if match.nodes else None
    if step is not None:
        raise StaleError(
            f"{match} is not there any more: {step}, at {step.location}, changed that part of the graph",
            path=match.path,
            hint=f"find the pattern again after that step, or undo it: sch.undo(to={step.index - 1})",
        )
    if len(present) == match.total:
        return present[match.index]
    raise StaleError(
        f"{match} is not there: the pattern matched {match.total} places at {_where(match.path)} when it was "
        f"found, and matches {len(present)} now",
        path=match.path,
        hint="find the pattern again",
    )


def _nearest_miss(pattern: GraphPattern, node: Node) -> str | None:
    misses = (pattern.nearest_miss(first_graph(each), each.module) for each in node.walk() if each.graph is not None)
    return next(filter(None, misses), None)


def _as_matches(value: Any) -> tuple[Match, ...] | None:
    """Return matches that were given; None for a pattern."""
    if isinstance(value, Match):
        return (value,)
    if isinstance(value, tuple | list) and all(isinstance(each, Match) for each in value):
        return tuple(value)
    return None


def _lies_at(match: Match, node: Node) -> bool:
    return not node.path or match.path == node.path or match.path.startswith(f"{node.path}.")


def _where(path: str) -> str:
    return f"'{path}'" if path else "the root"


def _refusal(primitive: Primitive, node: Node, problem: str, hint: str | None = None) -> PreconditionError:
    violation = Violation(problem, hint)
    return PreconditionError(
        f"cannot apply {primitive.name} at {_where(node.path)}: {violation}", violations=[violation], path=node.path
    )
