"""Where a pattern matches in one graph, as the places of a rewrite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from slapo_core.errors import ApplyError, TraceError
from slapo_core.graph.patterns.calls import Attribute
from slapo_core.graph.rewriting.actions import Action, Place
from slapo_core.graph.rewriting.adapting import given_by
from slapo_core.graph.rewriting.placing import CannotPlace
from slapo_core.graph.rewriting.region import Read
from slapo_core.graph.rewriting.rewrite import Rewrite, rewritten
from slapo_core.spec.graph import Match
from slapo_core.spec.tracer import Recorded

if TYPE_CHECKING:
    from slapo_core.graph.patterns.pattern import GraphPattern

__all__ = ["applied", "by_pattern", "places_of", "rewrite_of"]


def places_of(pattern: GraphPattern, recorded: Recorded, module: nn.Module) -> tuple[list[Place], str | None]:
    """Every match of a pattern, in the graph's order; and where there is none, what comes nearest."""
    places = [
        Place(
            tuple(found.nodes),
            tuple(map(_operand, found.inputs)),
            {name: _captured(value) for name, value in found.captures.items()},
        )
        for found in pattern.matches(recorded.graph, module)
    ]
    return places, None if places else pattern.nearest_miss(recorded.graph, module)


def _operand(value: Any) -> Any:
    return Read(value.path) if isinstance(value, Attribute) else value


def _captured(value: Any) -> Any:
    return _operand(value) if isinstance(value, fx.Node | Attribute) else ("constant", value)


def by_pattern(matches: Sequence[Match]) -> list[tuple[Any, list[Match]]]:
    """The matches of each pattern together, in the order in which the patterns first come."""
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
    """The rewrite that acts on ``matches`` of one pattern, as they lie in this graph.

    Raises:
        ApplyError: one of them is not there.
    """
    places, miss = places_of(pattern, recorded, module)
    names = [tuple(node.name for node in place.nodes) for place in places]
    indices = []
    for match in matches:
        if match.nodes:
            index = names.index(match.nodes) if match.nodes in names else None
        else:
            index = match.index if match.total == len(places) else None
        if index is None:
            nearest = f"; nearest to it comes this: {miss}" if miss else ""
            raise ApplyError(
                f"{match} is not in the graph: the pattern now matches {len(places)} places there{nearest}",
                path=match.path,
                hint="find the pattern again",
            )
        indices.append(index)
    chosen = tuple(sorted(set(indices)))
    return Rewrite(pattern, chosen, len(places), action, tuple(given_by(places[index]) for index in chosen))


def applied(
    rewrite: Rewrite, recorded: Recorded, module: nn.Module, where: str, path: str, *, first: bool
) -> tuple[Recorded, tuple[str, ...]]:
    """The graph of one variant, rewritten.

    Args:
        rewrite: what is done.
        recorded: the variant.
        module: the traced one.
        where: it stands, for messages.
        path: of it.
        first: whether the rewrite is being made; else it is repeated.

    Raises:
        ApplyError: a match cannot become one call.
        TraceError: that happens in a variant that was recorded later, or the pattern matches another number of places.
    """
    places, miss = places_of(rewrite.pattern, recorded, module)
    name = rewrite.action.name
    if len(places) != rewrite.total:
        nearest = f"; nearest to it comes this: {miss}" if miss else ""
        raise TraceError(
            f"the rewrite '{name}' of {where} cannot be repeated in another variant of its graph (train or eval, other "
            f"arguments): its pattern matched {rewrite.total} places, and matches {len(places)} there{nearest}",
            path=path,
            hint="call the module as it was traced, or take a pattern that matches both, e.g. with optional steps",
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
                f"the match of '{name}' at {where} cannot be taken out: {error.problem}", path=path, hint=error.hint
            ) from None
        raise TraceError(
            f"the rewrite '{name}' of {where} cannot be repeated in another variant of its graph: {error.problem}",
            path=path,
            hint=error.hint,
        ) from None
