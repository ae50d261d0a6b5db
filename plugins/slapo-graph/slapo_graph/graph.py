"""`TracedForward`: the static graph of a module, the history of its rewrites, and how it follows steps below."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from slapo_core.effects import Calls
from slapo_core.errors import ApplyError, ArgumentError, TraceError
from slapo_core.internals import forwards
from slapo_graph.example_calls import example_call
from slapo_graph.leaves import Leaves, is_predefined
from slapo_graph.match import name_of
from slapo_graph.pool import Pool, is_pure
from slapo_graph.printing import printed
from slapo_graph.protocol import Tracer
from slapo_graph.rewriting.actions import Action, Outline, Replacement, as_before
from slapo_graph.rewriting.rewrite import Rewrite, applied, by_pattern, matches_in, rewrite_of
from slapo_graph.specialization import Specialization, Structure
from slapo_graph.tracing.fake import FakeMode, without_values
from slapo_graph.variants import RecordedForward

if TYPE_CHECKING:
    from slapo_core import Edit, Node
    from slapo_graph.match import Match, Region


class TracedForward(RecordedForward):
    """The graph of a traced module, and the history of its rewrites.

    It runs in place of the module's forward.

    A rewrite makes another graph, with the rewrite repeated in each variant. After a step at a module below, the graph
    is recorded again, with all rewrites.

    Args:
        forward: as of :class:`~slapo_graph.variants.RecordedForward`, like the next four.
        tracer: likewise.
        leaves: likewise.
        path: likewise.
        pool: likewise.
        beneath: the graph before the rewrite.
        rewrite: of ``beneath``; both or neither.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        tracer: Tracer,
        leaves: Leaves,
        *,
        path: str = "",
        pool: Pool | None = None,
        beneath: TracedForward | None = None,
        rewrite: Rewrite | None = None,
    ) -> None:
        super().__init__(forward, tracer, leaves, path=path, pool=pool)
        self.beneath, self.rewrite = beneath, rewrite

    def __str__(self) -> str:
        """Return the variant recorded first, as Python."""
        first = self.first
        if first is None:
            return f"# {self!r}: recorded at its first call"
        code = printed(first.recorded)
        more = f"# the first of {len(self.variants)} variants\n" if len(self.variants) > 1 else ""
        return f"{more}{code}"

    @property
    def fx_graph(self) -> fx.Graph:
        """Return the graph in which patterns are found, and that matches name nodes of."""
        assert self.first is not None
        return self.first.recorded.graph

    @property
    def called(self) -> tuple[str, ...]:
        """Return the paths of the modules that the graph calls."""
        nodes = self.first.recorded.graph.nodes if self.first is not None else ()
        return tuple(dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module"))

    @property
    def no_longer_called(self) -> tuple[str, ...]:
        return self.first.no_longer_called if self.first is not None else ()

    @property
    def node_names(self) -> frozenset[str]:
        first = self.first
        return frozenset(node.name for node in first.recorded.graph.nodes) if first is not None else frozenset()

    def is_like(self, other: forwards.ReplacedForward, module: nn.Module) -> bool:
        def history(graph: TracedForward) -> Any:
            return graph.forward, type(graph.tracer), graph.leaves, graph.rewrites

        if not isinstance(other, TracedForward) or history(self) != history(other):
            return False
        found = [
            (each, modules) for each in self.variants if (modules := each.structure.modules_of(module)) is not None
        ]
        return bool(found) and all(
            is_pure(each.recorded) and each.checks.violated(modules) is None for each, modules in found
        )

    # -- rewrites ---------------------------------------------------------------------------------------------

    @property
    def is_rewritten(self) -> bool:
        return self.rewrite is not None

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        """Return the rewrites, oldest first."""
        before = self.beneath.rewrites if self.beneath is not None else ()
        return before if self.rewrite is None else (*before, self.rewrite)

    def effects(self, patterns: Sequence[Any], node: Node) -> Iterator[Calls]:
        """Yield the calls that rewrites of these patterns put into the graph.

        Args:
            patterns: of matches of a step.
            node: of this graph.
        """
        names = [rewrite.action.name for rewrite in self.rewrites if rewrite.pattern in patterns]
        if not names and not any(graph_of(below) for below in node.walk() if below.path != node.path):
            yield Calls(self.shown("the replacement"), at=node.path)  # lost; or it is in a graph below
        there = Counter(self.first.calls_of_steps() if self.first is not None else ())
        for name in dict.fromkeys(names):
            if there[name]:  # or a later step took the call into its region
                yield Calls(self.shown(name), there[name], at=node.path)

    def with_region_called(
        self, module: nn.Module, matches: Sequence[Match], transform: Callable[[Region], Region], *, name: str
    ) -> TracedForward:
        """Replace each match by one call of ``transform(region)``, in every variant.

        Args:
            module: the traced module.
            matches: of this graph; no two share a node.
            transform: returns the replacement of a region; called once for each distinct region, for all places
                that compute the same. To pickle the model, it must be picklable.
            name: of the call in the printed graph.

        Raises:
            ApplyError: a match cannot become one call: it is not convex, a tensor is written to in place between
                its nodes, or the RNG would be used in another order. The region calls modules with hooks or steps as
                before.
        """
        return self._rewritten(module, matches, Outline(transform, name))

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
    ) -> TracedForward:
        """Replace each match by one call of ``new``, in every variant.

        Args:
            module: the traced module.
            matches: as for :meth:`with_region_called`.
            new: a function, or the path of a module below the traced one.
            arguments: names of captures, or numbers of inputs, passed by position.
            keywords: the same, by keyword.
            name: of the call in the printed graph.
            results: names of the captures that the results replace, in order; empty: the values used outside of the
                match, in the graph's order.
            results_only: ``new`` returns the last value of a match only; other outputs of the traced module become
                None, and other uses are refused.
            then: converts the output of ``new`` to the results.
            undone: makes, for the traced module, a context in which the replaced modules can run, to record another
                variant; None: they always can.

        Raises:
            ApplyError: as for :meth:`with_region_called`; or a match lacks a capture, or calls a module with hooks
                or steps.
        """
        named = tuple((keywords or {}).items())
        outputs = {len(match.outputs) for match in matches}
        values = outputs.pop() if len(outputs) == 1 and not results and then is None else None
        values = 1 if results_only else values
        action = Replacement(new, tuple(arguments), named, name, tuple(results), then, undone, values, results_only)
        return self._rewritten(module, matches, action)

    def _rewritten(self, module: nn.Module, matches: Sequence[Match], action: Action) -> TracedForward:
        graph = self
        for pattern, members in by_pattern(matches):
            first = graph.first
            if first is None:
                raise ApplyError(f"{name_of(self.path)} has no recorded graph to rewrite", path=self.path)
            rewrite = rewrite_of(pattern, members, first.recorded, module, action)
            graph = graph._with(rewrite, module)
        return graph

    def _with(self, rewrite: Rewrite, module: nn.Module) -> TracedForward:
        made = TracedForward(
            self.forward, self.tracer, self.leaves, path=self.path, pool=self.pool, beneath=self, rewrite=rewrite
        )
        made.structures = self.structures  # the same list: calls have the same keys in both
        made.example = self.example
        first = self.first
        if first is not None:
            made._first = made._repeated(first, module, first.structure, first=True)
        with as_before(rewrite.action, module):
            alike = [variant for variant in self.variants if variant.structure.modules_of(module) is not None]
        for key, variants in self.specializations.items():
            for variant in variants:
                if variant in alike:  # others are recorded again at their next call
                    again = made._first if variant is first else None
                    again = again or made._repeated(variant, module, variant.structure)
                    if again.structure.modules_of(module) is not None:  # without a child that came with the rewrite
                        made.specializations.setdefault(key, []).append(again)
        return made

    def _new_variant(
        self, module: nn.Module, values: tuple[Any, ...], structure: Structure, key: Any
    ) -> Specialization:
        if self.beneath is None:
            return super()._new_variant(module, values, structure, key)
        assert self.rewrite is not None
        with as_before(self.rewrite.action, module):
            beneath = self.beneath.variant(module, values)
        return self._repeated(beneath, module, structure)

    def _repeated(
        self, variant: Specialization, module: nn.Module, structure: Structure, *, first: bool = False
    ) -> Specialization:
        """Repeat the rewrite on a variant; ``structure`` is that of the modules after the rewrite."""
        assert self.rewrite is not None
        made = variant.rewritten_alike(self.rewrite, module)
        if made is None:
            recorded, paths = applied(self.rewrite, variant.recorded, module, self.path, first=first)
            no_longer_called = tuple(dict.fromkeys((*variant.no_longer_called, *paths)))
            made = Specialization(recorded, structure, variant.surroundings, no_longer_called)
            variant.keep_rewritten(self.rewrite, module, made)
        return made

    # -- steps at modules below -------------------------------------------------------------------------------

    def take_up(self, change: forwards.ChangeBelow, node: Node, edit: Edit) -> None:
        below = change.path.removeprefix(f"{node.path}.") if node.path else change.path
        where = name_of(node.path)
        own_graph = change.forward if isinstance(change.forward, TracedForward) else None
        if change.is_wrapped:
            child, own_graph = change.node, None
            if child is not None and not child.forward_is_replaced:
                own_graph = self.graph_of_child(below, child.module, functools.partial(example_call, child))
        try:
            uncalled = self.retrace_changed(node.module)
        except TraceError as error:
            if own_graph is not None and change.node is not None:
                both = self.split_out(node.module, own_graph, change.node.module)
                if both is not None:
                    edit.set_forward(node, both[0])
                    edit.set_forward(change.node, both[1])
                    return
            if change.is_waiting:
                return
            raise ApplyError(
                f"'{change.path}' is part of a rewritten region of the graph of {where}: {error.message}",
                path=change.path,
                hint="apply that step before the rewrite",
            ) from error
        if change.is_call and any(f"{below}.".startswith(f"{each}.") for each in uncalled):
            raise ApplyError(
                f"'{change.path}' is no longer called: the graph of {where} was rewritten; hooks and wrappers "
                "there would have no effect",
                path=change.path,
                hint="apply that step before the rewrite",
            )
        if own_graph is not None and change.is_wrapped and change.node is not None:
            edit.set_forward(change.node, own_graph)

    def retrace_changed(
        self, module: nn.Module, calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]] = ()
    ) -> tuple[str, ...]:
        """Record again after steps at modules below, and repeat all rewrites.

        Where the forward cannot run, e.g. between two steps of a split, the next step or call records it.

        Args:
            module: the traced module.
            calls: further candidates for its arguments.

        Returns:
            paths of modules that the rewritten graph no longer calls.

        Raises:
            TraceError: a rewrite cannot be repeated in the new graph.
        """
        self._snapshots.clear()
        self.select_variant(module)
        if self.example is not None and not self.holds(module):
            examples = itertools.chain([self.example], (self.parameters.bind(module, *call) for call in calls))
            example = next((each for each in examples if self._runs(module, each)), None)
            if example is None:
                return ()
            self._first = self.variant(module, example)
            self.example = without_values(FakeMode(), example)
        return self.no_longer_called

    def _runs(self, module: nn.Module, example: tuple[Any, ...]) -> bool:
        """Return whether the unrewritten forward can be recorded for these values."""
        base = self
        with contextlib.ExitStack() as before:
            while base.beneath is not None:
                assert base.rewrite is not None
                before.enter_context(as_before(base.rewrite.action, module))
                base = base.beneath
            key, *_ = base._key(module, example)
            exact = base._exact(module, example, key)
            if base.pool.fails(exact, module):
                return False
            try:
                base.variant(module, example)
            except TraceError as error:
                read = getattr(error, "slapo_read", None)
                if read is not None:
                    base.pool.add_failure(exact, module, read)
                return False
        return True

    def graph_of_child(
        self, below: str, child: nn.Module, call: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> TracedForward | None:
        """Return a graph for an inlined module below, which becomes a call.

        Args:
            below: its path, relative to the traced module.
            child: the module.
            call: returns its arguments.

        Returns:
            its graph, to run within the wrappers; None if its code is not inlined here, or cannot be recorded.
        """
        first = self.first
        if first is None or not self.leaves.flatten or is_predefined(child) or self.leaves.names(child, below):
            return None
        if not self.leaves(child, below):  # a graph can hold its wrappers
            return None
        path = f"{self.path}.{below}" if self.path else below
        made = TracedForward(forwards.ModuleForward.of(child).bottom, self.tracer, Leaves(flatten=True), path=path)
        try:
            made.record(child, [call()])
        except (ArgumentError, TraceError):
            return None
        return made

    def split_out(
        self, module: nn.Module, inner: TracedForward, child: nn.Module
    ) -> tuple[TracedForward, TracedForward] | None:
        """Return this graph without ``inner``, and ``inner``, with all rewrites repeated.

        Args:
            module: the traced one.
            inner: from :meth:`graph_of_child`.
            child: the module of ``inner``, which is a call now.

        Returns:
            both; None where a rewrite cannot be repeated so.
        """
        base = self
        while base.beneath is not None:
            base = base.beneath
        outer = TracedForward(base.forward, self.tracer, self.leaves, path=self.path, pool=base.pool)
        graphs = [(outer, module), (inner, child)]
        try:
            if self.example is None:
                return None
            outer.variant(module, self.example)
            outer.example = self.example
            for rewrite in self.rewrites:
                graphs = [
                    (graph._with(part, below) if part is not None else graph, below)
                    for part, (graph, below) in zip(_split_rewrite(rewrite, graphs), graphs, strict=True)
                ]
        except (ApplyError, TraceError):
            return None
        return graphs[0][0], graphs[1][0]

    def rebind(self, twin: Callable[[Any], Any]) -> None:
        graph: TracedForward | None = self
        while graph is not None:
            graph.forward = twin(graph.forward)
            graph = graph.beneath

    def __getstate__(self) -> dict[str, Any]:
        names = ("forward", "tracer", "leaves", "path", "pool", "beneath", "rewrite")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def graph_of(node: Node) -> TracedForward | None:
    """Return the graph that runs as a module's forward; None if the module is not traced."""
    graph = node.state.get("forward")
    if not isinstance(graph, TracedForward):
        return None
    graph.select_variant(node.module)
    return graph


def _split_rewrite(rewrite: Rewrite, graphs: Sequence[tuple[TracedForward, nn.Module]]) -> list[Rewrite | None]:
    """Split a rewrite among the graphs that now hold its matches.

    Raises:
        TraceError: the graphs have other matches than before.
    """
    counts = []
    for graph, module in graphs:
        assert graph.first is not None
        counts.append(len(matches_in(rewrite.pattern, graph.first.recorded, module)[0]))
    is_complete = len(rewrite.indices) == rewrite.total and len(set(rewrite.captured)) == 1
    if sum(counts) != rewrite.total or not (is_complete or counts[0] == rewrite.total):
        raise TraceError(f"the rewrite '{rewrite.action.name}' cannot be repeated")
    if isinstance(getattr(rewrite.action, "new", None), str) and counts[0] != rewrite.total:
        raise TraceError(f"'{rewrite.action.name}' is a module of the graph around it")
    return [
        rewrite
        if count == rewrite.total
        else replace(rewrite, indices=tuple(range(count)), total=count, captured=rewrite.captured[:count])
        if count
        else None
        for count in counts
    ]
