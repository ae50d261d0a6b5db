"""Rewrites of a graph, repeated in every specialization."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from slapo_core.errors import ApplyError, TraceError
from slapo_graph.effects import Effects
from slapo_graph.match import Match, name_of
from slapo_graph.patterns.data import Attribute
from slapo_graph.private import is_erased
from slapo_graph.protocol import Recorded, check
from slapo_graph.rewriting.actions import Action, NewCall
from slapo_graph.rewriting.region import CannotPlace, nodes_after
from slapo_graph.tracing.writer import empty_graph

if TYPE_CHECKING:
    from slapo_graph.patterns.pattern import GraphPattern, MatchedNodes


@dataclass(frozen=True)
class Rewrite:
    """An action on some of the matches of a pattern.

    Args:
        pattern: as :class:`slapo_graph.match.Match` holds it.
        indices: numbers of the matches, ascending.
        total: the number of all matches.
        action: on each match.
        captured: for each index, the names of its match's captures.
    """

    pattern: Any
    indices: tuple[int, ...]
    total: int
    action: Action
    captured: tuple[frozenset[str], ...]

    def __hash__(self) -> int:
        return hash((self.indices, self.total))  # patterns are large, and few differ


def rewritten(
    recorded: Recorded, module: nn.Module, places: Sequence[MatchedNodes], action: Action
) -> tuple[Recorded, tuple[str, ...]]:
    """Return a new graph with ``action`` at each place, and the absorbed modules.

    Raises:
        CannotPlace: a match cannot become one call.
    """
    graph = empty_graph()
    twins: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(recorded.graph, twins)
    output = recorded.graph.output_node()
    twins[output] = graph.node_copy(output, lambda node: twins[node])
    flags, no_longer_called = list(recorded.flags), list[str]()
    for place in places:
        call = _rewrite_one(graph, module, _moved(place, twins), action, twins)
        flags += [flag for flag in call.flags if flag not in flags]
        no_longer_called += call.no_longer_called
    graph.lint()
    return replace(recorded, graph=graph, flags=tuple(flags)), tuple(dict.fromkeys(no_longer_called))


def _moved(place: MatchedNodes, twins: dict[fx.Node, fx.Node]) -> MatchedNodes:
    def twin(value: Any) -> Any:
        return twins[value] if isinstance(value, fx.Node) else value

    return replace(
        place,
        nodes=tuple(map(twin, place.nodes)),
        inputs=tuple(map(twin, place.inputs)),
        captures={name: twin(value) for name, value in place.captures.items()},
    )


def _rewrite_one(
    graph: fx.Graph, module: nn.Module, place: MatchedNodes, action: Action, twins: dict[fx.Node, fx.Node]
) -> NewCall:
    inside = {node for node in place.nodes if node.op not in ("get_attr", "placeholder", "output")}
    if not inside:
        raise CannotPlace("nothing is computed there")
    effects = Effects(graph, module)
    nodes = [node for node in graph.nodes if node in inside]
    _drop_type_checks(graph, nodes, inside)
    if action.results_only:
        given, output = only_given_out(nodes), graph.output_node()
        output.args = fx.map_arg(output.args, lambda node: None if node in given else node)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)] or nodes[-1:]
    call = action.call(place, nodes, outputs, module, effects)
    after = nodes_after(nodes, effects)
    anchor = nodes[-1].next
    needed = {value for node in nodes for value in node.all_input_nodes} - inside
    outputs = list(call.results or outputs)
    with graph.inserting_before(anchor):
        new = _inserted(graph, call, action.name)
        new.meta["step"] = action.name
        new.meta["location"] = nodes[-1].meta.get("location")
        if call.then is not None:
            new = graph.call_function(call.then, (new,))
        results = (
            [new]
            if len(outputs) == 1
            else [graph.call_function(operator.getitem, (new, position)) for position in range(len(outputs))]
        )
    for moved in after:
        anchor.prepend(moved)
    successors = {}
    for old, result in zip(outputs, results, strict=True):
        if "example" in old.meta:
            result.meta["example"] = old.meta["example"]
        old.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
        successors[old] = result
    for node in reversed(nodes):
        graph.erase_node(node)
    for first, twin in twins.items():
        if twin in successors:
            twins[first] = successors[twin]
    _drop_unused(graph, needed, effects)
    return call


def _inserted(graph: fx.Graph, call: NewCall, name: str) -> fx.Node:
    reads: dict[Attribute, fx.Node] = {}

    def real(value: Any) -> Any:
        if not isinstance(value, Attribute):
            return value
        if value not in reads:
            reads[value] = graph.get_attr(value.path)
        return reads[value]

    args = tuple(map(real, call.args))
    kwargs = {key: real(value) for key, value in call.kwargs.items()}
    return graph.create_node(call.op, call.target, args, kwargs, name=name)


def only_given_out(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes of a match, except the last, that only the graph's output uses outside of the match."""
    inside = set(nodes)
    return [node for node in nodes[:-1] if {user.op for user in node.users if user not in inside} == {"output"}]


_DECIDED_BY_INPUTS = ("dtype", "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_mkldnn")


def _drop_type_checks(graph: fx.Graph, nodes: Sequence[fx.Node], inside: set[fx.Node]) -> None:
    """Drop guards on dtype or device of inner values; guards of the arguments decide these."""
    for node in nodes:
        for user in list(node.users):
            is_read = user not in inside and user.target is getattr and user.args[1] in _DECIDED_BY_INPUTS
            if is_read and all(each.target is check for each in user.users):
                for each in list(user.users):
                    graph.erase_node(each)
                graph.erase_node(user)


def _drop_unused(graph: fx.Graph, candidates: set[fx.Node], effects: Effects) -> None:
    """Remove inputs that only the matched nodes used and that have no effects."""
    stack = list(candidates)
    while stack:
        node = stack.pop()
        if not is_erased(node) and not node.users and effects.is_pure(node):
            stack.extend(node.all_input_nodes)
            graph.erase_node(node)


# The matches of a rewrite.


def matches_in(pattern: GraphPattern, recorded: Recorded, module: nn.Module) -> tuple[list[MatchedNodes], str | None]:
    """Return all matches of a pattern in graph order, and the closest candidate if there are none."""
    places = pattern.matches(recorded.graph, module)
    return places, None if places else pattern.nearest_miss(recorded.graph, module)


def by_pattern(matches: Sequence[Match]) -> list[tuple[Any, list[Match]]]:
    """Group matches by pattern, in order of first appearance."""
    groups: list[tuple[Any, list[Match]]] = []
    for match in matches:
        for pattern, members in groups:
            if pattern == match.pattern:
                members.append(match)
                break
        else:
            groups.append((match.pattern, [match]))
    return groups


def rewrite_of(
    pattern: Any, matches: Sequence[Match], recorded: Recorded, module: nn.Module, action: Action
) -> Rewrite:
    """Return the rewrite of ``matches`` of one pattern in this graph.

    Raises:
        ApplyError: a match is not there.
    """
    places, miss = matches_in(pattern, recorded, module)
    names = [tuple(node.name for node in place.nodes) for place in places]
    indices = []
    for match in matches:
        if match.nodes:
            index = names.index(match.nodes) if match.nodes in names else None
        else:
            index = match.index if match.total == len(places) else None
        if index is None:
            nearest = f"; closest candidate: {miss}" if miss else ""
            raise ApplyError(
                f"{match} is not in the graph: the pattern now matches {len(places)} places there{nearest}",
                path=match.path,
                hint="find the pattern again",
            )
        indices.append(index)
    chosen = tuple(sorted(set(indices)))
    return Rewrite(pattern, chosen, len(places), action, tuple(places[index].captured for index in chosen))


def applied(
    rewrite: Rewrite, recorded: Recorded, module: nn.Module, path: str, *, first: bool
) -> tuple[Recorded, tuple[str, ...]]:
    """Rewrite the graph of one specialization.

    Args:
        rewrite: to apply.
        recorded: the variant.
        module: the traced one.
        path: of it, for messages.
        first: whether the rewrite is new; otherwise it is repeated.

    Raises:
        ApplyError: a match cannot become one call.
        TraceError: the same in a repetition, or the pattern has another number of matches there.
    """
    places, miss = matches_in(rewrite.pattern, recorded, module)
    name, where = rewrite.action.name, name_of(path)
    if len(places) != rewrite.total:
        nearest = f"; closest candidate: {miss}" if miss else ""
        raise TraceError(
            f"the rewrite '{name}' of {where} cannot be repeated in another specialization of its graph (train or "
            f"eval, other arguments): its pattern matched {rewrite.total} places, and matches {len(places)} "
            f"there{nearest}",
            path=path,
            hint="call the module as it was traced, or write a pattern that matches both, e.g. with patterns.optional",
        )
    chosen = [
        replace(places[index], captured_first=None if first else captured)
        for index, captured in zip(rewrite.indices, rewrite.captured, strict=True)
    ]
    try:
        return rewritten(recorded, module, chosen, rewrite.action)
    except CannotPlace as error:
        if first:
            raise ApplyError(
                f"the match of '{name}' at {where} cannot become one call: {error.problem}", path=path, hint=error.hint
            ) from None
        raise TraceError(
            f"the rewrite '{name}' of {where} cannot be repeated in another specialization of its graph: "
            f"{error.problem}",
            path=path,
            hint=error.hint,
        ) from None
