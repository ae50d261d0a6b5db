"""The query ``find``: matches in the graphs of nodes, and modules that were not searched."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ArgumentError, TraceError
from slapo_core.internals import Internals
from slapo_core.plugins import CORE_DISTRIBUTION, FIRST_PARTY, owner_of, split_name
from slapo_graph.example_calls import example_calls
from slapo_graph.graph import graph_of
from slapo_graph.match import Match, name_of

if TYPE_CHECKING:
    from torch import fx

    from slapo_core import Node, Schedule
    from slapo_core.plugins import Registry
    from slapo_graph.patterns.pattern import GraphPattern, MatchedNodes


def opaque_calls(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Return the calls of modules that ``flatten=True`` would inline, in the graphs of ``nodes``.

    Modules of torch.nn stay calls, and so do :func:`hooked_calls`.
    """
    return tuple(path for node in nodes for path in _calls(node, hooked=False))


def hooked_calls(nodes: Collection[Node]) -> tuple[str, ...]:
    """Return the calls that ``flatten=True`` keeps: of modules with hooks or with a forward of the instance.

    Modules among ``nodes`` are left out.
    """
    own = {node.path for node in nodes}
    return tuple(path for node in nodes for path in _calls(node, hooked=True) if path not in own)


def how_to_open(closed: tuple[str, ...], hooked: tuple[str, ...] = ()) -> str:
    """Explain why modules were not searched, and the call that opens them.

    Args:
        closed: of :func:`opaque_calls`.
        hooked: of :func:`hooked_calls`.
    """
    reasons = []
    if closed:
        them = "it is one call" if len(closed) == 1 else "each is one call"
        reasons.append(f"{_shown(closed)}; {them} in the graph; trace(flatten=True) inlines it")
    if hooked:
        reasons.append(
            f"{_shown(hooked)}, because of hooks or a forward set on the instance; traced on its own, "
            f"sch[{hooked[0]!r}].trace(), its own code is searched"
        )
    return f"not searched: {'; '.join(reasons)}"


def _calls(node: Node, *, hooked: bool) -> Iterator[str]:
    """Yield calls of modules with code of their own: of hooked ones, or of the others."""
    from slapo_graph.leaves import is_changed, is_predefined

    graph: Any = graph_of(node)
    if graph is None or graph.first is None or (graph.leaves.flatten and not hooked):
        return
    for target in dict.fromkeys(
        str(each.target) for each in graph.first.recorded.graph.nodes if each.op == "call_module"
    ):
        module = node.module.get_submodule(target)
        if not is_predefined(module) and is_changed(module) is hooked:
            yield f"{node.path}.{target}" if node.path else target


def _shown(paths: tuple[str, ...]) -> str:
    return ", ".join(map(repr, paths[:3])) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


class Matches(list[Match]):
    """The result of ``find``: a list, in the model's order.

    Args:
        matches: the places.
        untraced: paths of modules that were not searched: neither they nor a module above is traced.
        closed: without matches: paths of modules that are one call each, and that ``trace(flatten=True)`` would
            inline.
        hooked: without matches: paths of modules that are one call because of hooks or wrapped forwards.
        expression: without matches: the text of the pattern, if it is a regular expression, not a glob.
    """

    def __init__(
        self,
        matches: Iterable[Match] = (),
        *,
        untraced: Sequence[str] = (),
        closed: Sequence[str] = (),
        hooked: Sequence[str] = (),
        expression: str | None = None,
    ) -> None:
        super().__init__(matches)
        self.untraced, self.closed, self.hooked = tuple(untraced), tuple(closed), tuple(hooked)
        self.expression = expression

    def __repr__(self) -> str:
        lines = [f"  {match}" for match in self]
        shown = ", ".join(repr(path) for path in self.untraced[:4])
        more = f" and {len(self.untraced) - 4} more" if len(self.untraced) > 4 else ""
        if self.untraced:
            lines.append(f"  not searched, not traced: {shown}{more}")
        if self.expression is not None:
            lines.append(f"  {how_to_search(self.expression)}")
        if self.closed or self.hooked:
            lines.append(f"  {how_to_open(self.closed, self.hooked)}")
        count = f"{len(self) or 'no'} {'match' if len(self) == 1 else 'matches'}"
        return "\n".join([f"<{count}{':' if lines else ''}", *lines]) + ">"


def how_to_search(expression: str) -> str:
    """Return the hint for a text that is a regular expression."""
    return f"a text is a glob, and '{expression}' is a regular expression: write re.compile({expression!r})"


def find(nodes: tuple[Node, ...], pattern: Any) -> Matches:
    """Find every match of ``pattern`` in the graphs of traced modules at or below the nodes.

    ``dense.find(lambda x, bias: F.gelu(x + bias))`` gives a :class:`Match` for each.

    Args:
        nodes: a node, the nodes of a group, or the root of a schedule.
        pattern: a function of the inputs, which computes the operations to find; a module; the name of a plugin's
            pattern, e.g. ``"fusion.sdpa"``; a glob or regular expression over the names of calls in
            ``print(node.graph)``; ``where(predicate)`` or ``any_of(...)`` of :mod:`slapo_graph.patterns`.

    Returns:
        the matches in the order of the model; no two share a graph node. The attribute ``untraced`` has the paths of
        modules that were not searched because they are not traced.

    Raises:
        TraceError: nothing at or below these nodes is traced.
        ArgumentError: it is not a pattern, or one that cannot be traced.
    """
    return find_in(nodes[0].schedule, nodes, pattern)


def find_in(schedule: Schedule, nodes: Sequence[Node], pattern: Any) -> Matches:
    """Match ``pattern`` in the graphs of traced modules at or below ``nodes``.

    Of several variants of a graph (train and eval, ...), the one recorded first is searched.

    Args:
        schedule: that the nodes belong to.
        nodes: where to look.
        pattern: as of :meth:`slapo_graph.primitives.find.find`.

    Raises:
        TraceError: nothing at or below them is traced.
        ArgumentError: it is not a pattern.
    """
    from slapo_graph.patterns.definition import pattern_of

    made = pattern_of(pattern, lambda name: load_pattern(Internals(schedule).registry, name))
    traced: dict[str, Node] = {}
    untraced: dict[str, None] = {}
    for node in nodes:
        _collect(node, traced, untraced)
    if not traced:
        where = ", ".join(name_of(node.path) for node in nodes[:3])
        first = nodes[0].path
        raise TraceError(
            f"nothing at or below {where} is traced: no graph to find {made} in",
            path=first,
            hint=f"sch[{first!r}].trace() first" if first else "sch.trace() first, or sch['a.b'].trace()",
        )
    matches = [match for node in traced.values() for match in matches_at(node, made)]
    if matches:
        return Matches(matches, untraced=tuple(untraced))
    searched = traced.values()
    globs = [
        step.target.name
        for alternative in made.alternatives
        for step in alternative.steps
        if step.target.kind == "glob"
    ]
    return Matches(
        untraced=tuple(untraced),
        closed=opaque_calls(searched),
        hooked=hooked_calls(searched),
        expression=next((glob for glob in globs if set(glob) & set("\\()|^$+") or glob.startswith(".*")), None),
    )


def matches_at(node: Node, pattern: GraphPattern) -> list[Match]:
    """Match in the graph of one traced node."""
    found = pattern.matches(first_graph(node), node.module)
    return [match_of(node.path, pattern, each, index, len(found)) for index, each in enumerate(found)]


def match_of(path: str, pattern: GraphPattern, found: MatchedNodes, index: int, total: int) -> Match:
    """Make the public match of a place in a graph.

    Args:
        path: of the traced module.
        pattern: that was found.
        found: the place.
        index: which it is.
        total: of how many.
    """
    return Match(
        path,
        pattern,
        index,
        total,
        nodes=tuple(node.name for node in found.nodes),
        inputs=tuple(_name(value) for value in found.inputs),
        outputs=tuple(node.name for node in found.outputs),
        captures={name: _captured(value) for name, value in found.captures.items()},
    )


def first_graph(node: Node) -> fx.Graph:
    """Return the graph to search: of the variant recorded first, or recorded now.

    If that fails, between two steps of a split, return the former graph.
    """
    graph: Any = graph_of(node)
    if graph.first is None:
        graph.record(node.module, example_calls(node))
    elif not graph.holds(node.module):
        with contextlib.suppress(ArgumentError, TraceError):
            graph.retrace_changed(node.module, example_calls(node))
    found: fx.Graph = graph.fx_graph
    return found


def load_pattern(registry: Registry, name: str) -> Any:
    """Load the pattern that a plugin registered as ``name``; None if that is a glob.

    Raises:
        PluginError: the pattern cannot be used, or its plugin is not installed.
    """
    parts = split_name(name)
    if parts is None:
        return None
    owner = owner_of(parts[0])
    known = any(entry.kind == "patterns" and entry.name == name for each in registry.plugins for entry in each.entries)
    expected = owner in FIRST_PARTY and owner != CORE_DISTRIBUTION
    return registry.load(name, "patterns") if expected or known else None


def _collect(node: Node, traced: dict[str, Node], untraced: dict[str, None]) -> None:
    """Collect the traced modules at and below ``node``, and the topmost without a graph."""
    for each in node.walk():
        if graph_of(each) is not None:
            traced.setdefault(each.path, each)
    _note_untraced(node, set(traced), untraced)


def _note_untraced(node: Node, traced: set[str], untraced: dict[str, None]) -> None:
    if node.path in traced:
        return
    prefix = f"{node.path}." if node.path else ""
    if not any(path.startswith(prefix) for path in traced):
        untraced.setdefault(node.path, None)
        return
    for child in node.children:
        _note_untraced(child, traced, untraced)


def _name(value: Any) -> str:
    from torch import fx

    return value.name if isinstance(value, fx.Node) else str(value)


def _captured(value: Any) -> Any:
    from torch import fx

    from slapo_graph.patterns.data import Attribute

    return _name(value) if isinstance(value, fx.Node | Attribute) else ("constant", value)
