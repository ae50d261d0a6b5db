"""`TracedForward`: what runs in place of a module's forward once it is traced."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import ApplyError, ArgumentError, GuardError, TraceError
from slapo_core.internals import forwards, module_index
from slapo_core.observers import PATCHING, is_recording
from slapo_graph import autocast_state
from slapo_graph.arguments import MISSING, Parameters, call_form, forms
from slapo_graph.effects import observe
from slapo_graph.guards import describe, fingerprint
from slapo_graph.leaves import Leaves, is_changed, is_predefined
from slapo_graph.pool import Pool, exact_form
from slapo_graph.printing import printed
from slapo_graph.private import (
    disable_dynamo,
    is_any_autocast_enabled,
    number_of_function_modes,
    parameters_of,
)
from slapo_graph.protocol import Flag, GuardViolation, Tracer, Untraceable
from slapo_graph.rewriting.actions import Action, Outline, Replacement, as_before
from slapo_graph.rewriting.rewrite import Rewrite, applied, by_pattern, places_of, rewrite_of
from slapo_graph.specialization import Call, Plan, Snapshot, Specialization
from slapo_graph.tracing.diagnostics import refusal
from slapo_graph.tracing.fake import FakeMode, without_values
from slapo_graph.tracing.outside import refusing_changes
from slapo_graph.tracing.reads import GlobalNames
from slapo_graph.tracing.session import attributes_kept, buffers_kept, drawn_back

if TYPE_CHECKING:
    from slapo_core import Edit, Node
    from slapo_graph.match import Match, Region


MOST_SPECIALIZATIONS = 16
MOST_FOR_ATTRIBUTES = 8
_CLOCK = itertools.count(1)


class TracedForward(forwards.ReplacedForward):
    """Run recorded graphs in place of a forward; takes the module first.

    There is a graph for every form of arguments, mode and types that it was called with, and for other values of the
    attributes and global names that the forward reads: a variant, recorded when it is first needed. A graph holds no
    module: the names in it are looked up in the one that is called, so that a copy of the model runs on itself.

    Args:
        forward: the forward that is recorded; takes the module first.
        tracer: records it.
        leaves: which modules below are called as they are.
        path: of the traced module, for messages.
        pool: recordings that equal modules share.
        beneath: the graphs that these were made of.
        rewrite: that made them of ``beneath``; both or neither.
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
        self.forward, self.tracer, self.leaves, self.path = forward, tracer, leaves, path
        self.pool = pool if pool is not None else Pool()
        self.beneath, self.rewrite = beneath, rewrite
        self.__name__, self.__qualname__ = "forward", f"the graph of {path}"  # as functions have
        self.parameters = Parameters(forward)
        self.specializations: dict[Any, list[Specialization]] = {}
        self.plans: list[Plan] = []
        self.has_dropped = False  # a variant, for one of another form
        self.recorded_anew = 0  # because an attribute or a global name had another value
        self._first: Specialization | None = None
        self._snapshots: dict[int, Snapshot] = {}  # by the id of a module
        self._has_snapshots = True  # False: a class below computes what they compare
        self.example: tuple[Any, ...] | None = None  # values of the parameters, without values of tensors

    @property
    def __signature__(self) -> Any:
        return self.parameters.signature

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given: Any = (*args, *kwargs.values())
        form, found = None, None
        if not torch.compiler.is_compiling() and not (number_of_function_modes() and is_recording()):
            form = (call_form(given, kwargs), _surroundings())
            snapshot = self._snapshots.get(id(module))
            if snapshot is not None:
                found = snapshot.calls.get((snapshot.modes(module), form))
        if found is not None and found.holds(module):
            variant = found.variant
            variant.used = next(_CLOCK)
            if found.arrange is not None:
                given = found.arrange(given)
        else:
            values = self.parameters.bind(module, args, kwargs)
            variant, given = self.variant(module, values), [value for value in values if value is not MISSING]
            if form is not None:
                self._remember(module, variant, form, self.parameters.arranging(module, len(args), tuple(kwargs)))
        try:
            return variant.run(module, given)
        except GuardViolation as error:
            guard = variant.recorded.guards[error.index]
            raise GuardError(
                f"the graph of {self._where} was recorded with {guard.value} == {guard.expected!r}, and this call has "
                f"{error.found!r}",
                path=self.path,
                location=guard.location,
                hint="the model decides there what to compute: call it as it was recorded, or trace only modules that "
                "lie below this decision",
            ) from None

    def _remember(self, module: nn.Module, variant: Specialization, form: Any, arrange: Any) -> None:
        """Note what runs for calls of a form, for as long as the modules are as they are now."""
        modules = variant.plan.modules_of(module)
        if not self._has_snapshots or modules is None or variant.checks.violated(modules) is not None:
            return
        snapshots, key = self._snapshots, id(module)
        snapshot = snapshots.get(key)
        if snapshot is None or snapshot.modes(module) is None:
            snapshot = variant.plan.snapshot(modules)
            if snapshot is None:
                self._has_snapshots = False
                return
            snapshot.root = weakref.ref(module, lambda _: snapshots.pop(key, None))
            snapshots[key] = snapshot
        modes = snapshot.modes(module)
        if modes is not None:
            swallowed = tuple(map(module.get_submodule, variant.swallowed))
            state = autocast_state.state() if variant.has_regions else None
            snapshot.calls[modes, form] = Call(variant, arrange, variant.checks.bound(modules), swallowed, state)

    def record(self, module: nn.Module, calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        """Record the graph for the first of these calls that can be recorded.

        Args:
            module: the traced module.
            calls: positional and keyword arguments; a later one is asked for only where those before do not fit.

        Raises:
            TraceError: it cannot be recorded for any.
            TypeError: the forward does not take these arguments.
        """
        refused: TraceError | None = None
        try:
            for call in calls:
                values = self.parameters.bind(module, *call)
                try:
                    self.variant(module, values)
                except TraceError as error:
                    refused = error
                    continue
                self.example = without_values(FakeMode(), values)
                return
        except TraceError as unknown:
            if refused is None:
                raise
            refused.hint = f"{unknown.message}; {unknown.hint}; or: {refused.hint}"
        assert refused is not None
        raise refused

    def follow(
        self, module: nn.Module, calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]] = ()
    ) -> tuple[str, ...]:
        """Record again after steps at modules below, and repeat all rewrites.

        Where the forward cannot run (between two steps that belong together, say) nothing is recorded: the next call
        will, or another step before.

        Args:
            module: the traced module.
            calls: what it may be called with now, if not with what it was recorded with.

        Returns:
            paths of modules that the graph calls no more since it was rewritten.

        Raises:
            TraceError: the graph would be another one, in which what was done to this one cannot be repeated.
        """
        self._snapshots.clear()
        self.look(module)
        if self.example is not None and not self.holds(module):
            examples = itertools.chain([self.example], (self.parameters.bind(module, *call) for call in calls))
            example = next((each for each in examples if self._runs(module, each)), None)
            if example is None:
                return ()
            self._first = self.variant(module, example)
            self.example = without_values(FakeMode(), example)
        return self.swallowed

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

    def held_functions(self) -> tuple[Callable[..., Any], ...]:
        return (self.forward,)

    def rebind(self, twin: Callable[[Any], Any]) -> None:
        graph: TracedForward | None = self
        while graph is not None:
            graph.forward = twin(graph.forward)
            graph = graph.beneath

    def take_up(self, change: forwards.ChangeBelow, node: Node, edit: Edit) -> None:
        below = change.path.removeprefix(f"{node.path}.") if node.path else change.path
        where = f"'{node.path}'" if node.path else "the root"
        opened = change.forward if isinstance(change.forward, TracedForward) else None
        if change.is_wrapped:
            child = change.node
            is_own = child is not None and not child.forward_is_replaced
            if child is not None and is_own:
                from slapo_graph.example_calls import example_call

                opened = self.opened(below, child.module, functools.partial(example_call, child))
            else:
                opened = None
        try:
            uncalled = self.follow(node.module)
        except TraceError as error:
            if opened is not None and change.node is not None:
                parted = self.parted(node.module, opened, change.node.module)
                if parted is not None:
                    edit.set_forward(node, parted[0])
                    edit.set_forward(change.node, parted[1])
                    return
            if change.is_waiting:
                return
            raise ApplyError(
                f"'{change.path}' is part of a rewritten region of the graph of {where}: {error.message}",
                path=change.path,
                hint="change the module first, and rewrite then",
            ) from error
        if change.is_call and any(f"{below}.".startswith(f"{each}.") for each in uncalled):
            raise ApplyError(
                f"'{change.path}' is no longer called: the graph of {where} was rewritten; hooks and wrappers "
                "there would have no effect",
                path=change.path,
                hint="change the module first, and rewrite then",
            )
        if opened is not None and change.is_wrapped and change.node is not None:
            edit.set_forward(change.node, opened)

    def opened(
        self, below: str, child: nn.Module, call: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> TracedForward | None:
        """Return a graph for an inlined module below, which becomes a call.

        Args:
            below: its path, relative to the traced module.
            child: the module.
            call: gives what it is called with.

        Returns:
            its graph, to run within the wrappers; None if its code is not recorded here, or cannot be.
        """
        first = self.first
        if first is None or not self.leaves.flatten or is_predefined(child) or self.leaves.names(child, below):
            return None
        if not self.leaves(child, below):  # a graph can hold what is wrapped around it
            return None
        path = f"{self.path}.{below}" if self.path else below
        made = TracedForward(forwards.ModuleForward.of(child).bottom, self.tracer, Leaves(flatten=True), path=path)
        try:
            made.record(child, [call()])
        except (ArgumentError, TraceError):
            return None
        return made

    def parted(
        self, module: nn.Module, inner: TracedForward, child: nn.Module
    ) -> tuple[TracedForward, TracedForward] | None:
        """Return this graph without ``inner``, and ``inner``, with all rewrites repeated.

        Args:
            module: the traced one.
            inner: of :meth:`opened`.
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
                    for part, (graph, below) in zip(_shared_out(rewrite, graphs), graphs, strict=True)
                ]
        except (ApplyError, TraceError):
            return None
        return graphs[0][0], graphs[1][0]

    def look(self, module: nn.Module) -> None:
        """Select a specialization that matches the module as it is now."""
        if not self.holds(module):
            alike = (variant for variant in self.variants if variant.plan.modules_of(module) is not None)
            self._first = next(alike, self._first)

    def holds(self, module: nn.Module) -> bool:
        """Return whether the selected specialization matches the module."""
        first = self.first
        return first is None or first.plan.modules_of(module) is not None

    @property
    def first(self) -> Specialization | None:
        """Return the specialization in which patterns are found; None after unpickling."""
        return self._first if self._first is not None else next(iter(self.variants), None)

    @property
    def variants(self) -> list[Specialization]:
        """Return all recorded specializations."""
        return [variant for alike in self.specializations.values() for variant in alike]

    def __str__(self) -> str:
        """As Python; of several variants, the one recorded first."""
        first = self.first
        if first is None:
            return f"# {self!r}: recorded at its first call"
        code = printed(first.recorded)
        more = f"# the first of {len(self.variants)} variants\n" if len(self.variants) > 1 else ""
        return f"{more}{code}"

    def __repr__(self) -> str:
        return f"<static graph of {self._where}, variants: {len(self.variants)}>"

    def variant(self, module: nn.Module, values: tuple[Any, ...]) -> Specialization:
        """Return the graph for a call, recorded now if its signature is new.

        Args:
            module: the traced module.
            values: of the forward's parameters, in their order.

        Raises:
            TraceError: what is needed cannot be recorded, or what was done to the graph cannot be repeated there.
            GuardError: a module that a rewrite took out was hooked.
        """
        key, plan, modules = self._key(module, values)
        changed = None
        for found in self.specializations.get(key, ()):
            changed = found.checks.violated(modules)
            if changed is None:
                break
        else:
            return self._specialized(module, values, plan, key, changed)
        if not torch.compiler.is_compiling():
            found.used = next(_CLOCK)
        hooked = next((path for path in found.swallowed if is_changed(module.get_submodule(path))), None)
        if hooked is not None:
            raise GuardError(
                f"the graph of {self._where} does not call it any more since it was rewritten, and '{hooked}' got "
                "hooks, or another forward: that would have no effect",
                path=self.path,
                hint="change the module first, and rewrite then",
            )
        return found

    # -- rewriting ---------------------------------------------------------------------------------------------

    def outlined(
        self, module: nn.Module, matches: Sequence[Match], transform: Callable[[Region], Region], *, name: str
    ) -> TracedForward:
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
        named = tuple((keywords or {}).items())
        outputs = {len(match.outputs) for match in matches}
        values = outputs.pop() if len(outputs) == 1 and not results and then is None else None
        values = 1 if results_only else values
        action = Replacement(new, tuple(arguments), named, name, tuple(results), then, undone, values, results_only)
        return self._rewritten(module, matches, action)

    @property
    def swallowed(self) -> tuple[str, ...]:
        return self.first.swallowed if self.first is not None else ()

    @property
    def called(self) -> tuple[str, ...]:
        """Return the paths of the modules that the graph calls."""
        nodes = self.first.recorded.graph.nodes if self.first is not None else ()
        return tuple(dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module"))

    @property
    def node_names(self) -> frozenset[str]:
        first = self.first
        return frozenset(node.name for node in first.recorded.graph.nodes) if first is not None else frozenset()

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        """Return the rewrites, oldest first."""
        before = self.beneath.rewrites if self.beneath is not None else ()
        return before if self.rewrite is None else (*before, self.rewrite)

    def _rewritten(self, module: nn.Module, matches: Sequence[Match], action: Action) -> TracedForward:
        graph = self
        for pattern, members in by_pattern(matches):
            first = graph.first
            if first is None:
                raise ApplyError(f"{self._where} has no recorded graph to rewrite", path=self.path)
            rewrite = rewrite_of(pattern, members, first.recorded, module, action)
            graph = graph._with(rewrite, module)
        return graph

    def _with(self, rewrite: Rewrite, module: nn.Module) -> TracedForward:
        made = TracedForward(
            self.forward, self.tracer, self.leaves, path=self.path, pool=self.pool, beneath=self, rewrite=rewrite
        )
        made.plans = self.plans  # the same list: a form of a call has the same key in both
        made.example = self.example
        first = self.first
        if first is not None:
            made._first = made._repeated(first, module, first.plan, first=True)
        with as_before(rewrite.action, module):
            alike = [variant for variant in self.variants if variant.plan.modules_of(module) is not None]
        for key, variants in self.specializations.items():
            for variant in variants:
                if variant in alike:  # the others are recorded again if they are called
                    again = made._first if variant is first else None
                    again = again or made._repeated(variant, module, variant.plan)
                    if again.plan.modules_of(module) is not None:  # without a child that came with the rewrite
                        made.specializations.setdefault(key, []).append(again)
        return made

    def _repeated(
        self, variant: Specialization, module: nn.Module, plan: Plan, *, first: bool = False
    ) -> Specialization:
        """Repeat the rewrite on a variant; ``plan`` is that of its calls, after the rewrite."""
        assert self.rewrite is not None
        made = variant.rewritten_alike(self.rewrite, module)
        if made is None:
            recorded, swallowed = applied(self.rewrite, variant.recorded, module, self._where, self.path, first=first)
            all_swallowed = tuple(dict.fromkeys((*variant.swallowed, *swallowed)))
            made = Specialization(recorded, plan, variant.surroundings, all_swallowed)
            variant.keep_rewritten(self.rewrite, module, made)
        return made

    # ----------------------------------------------------------------------------------------------------------

    def _key(self, module: nn.Module, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], Plan, list[nn.Module]]:
        """Return the signature of a call, the module's plan, and its modules."""
        number, plan, modules = self._plan(module)
        key = (
            number,
            forms(values),
            tuple([below.training for below in modules]),
            tuple(
                [
                    (tensor.dtype, tensor.requires_grad)
                    for below in modules
                    for tensor in parameters_of(below).values()
                    if tensor is not None
                ]
            ),
            autocast_state.state(),
            torch.get_default_dtype(),
            not torch.compiler.is_compiling() and torch.is_inference_mode_enabled(),  # dynamo cannot say
        )
        return key, plan, modules

    def _plan(self, module: nn.Module) -> tuple[int, Plan, list[nn.Module]]:
        for number, plan in enumerate(self.plans):
            modules = plan.modules_of(module)
            if modules is not None:
                return number, plan, modules
        plan = Plan(module, self.leaves)
        modules = plan.modules_of(module)
        assert modules is not None
        self.plans.append(plan)
        return len(self.plans) - 1, plan, modules

    @disable_dynamo  # recording is not compiled: torch.compile breaks its graph here, once
    def _specialized(
        self, module: nn.Module, values: tuple[Any, ...], plan: Plan, key: Any, changed: tuple[Flag, Any] | None
    ) -> Specialization:
        """A new variant; ``changed`` is what those of the same form were recorded with, and what it is now."""
        if len(self.variants) >= MOST_SPECIALIZATIONS:
            self._drop_one()
        self.recorded_anew += changed is not None
        if changed is not None and self.recorded_anew == MOST_FOR_ATTRIBUTES:
            flag, found = changed
            warnings.warn(
                f"{self._where} was recorded again {MOST_FOR_ATTRIBUTES} times because attributes changed that its "
                f"forward reads, most recently {flag.name} from {describe(flag.expected)} to "
                f"{describe(fingerprint(found))}: pass what varies as an argument, or trace a narrower node",
                stacklevel=2,
            )
        made = self._shared(module, values, plan, key)
        self.specializations.setdefault(key, []).append(made)
        self._snapshots.clear()  # it may come before others
        return made

    def _drop_one(self) -> None:
        """Drop the least recently used variant."""
        others = [variant for variant in self.variants if variant is not self.first]
        dropped = min(others, key=lambda variant: variant.used)
        for key, alike in list(self.specializations.items()):
            alike[:] = [variant for variant in alike if variant is not dropped]
            if not alike:
                del self.specializations[key]
        if not self.has_dropped:
            warnings.warn(
                f"{self._where} exceeded the limit of {MOST_SPECIALIZATIONS} specializations: the least recently used "
                "graph is dropped, and recorded again when needed; pass what varies as numbers or tensors, or trace "
                "a narrower node",
                stacklevel=2,
            )
        self.has_dropped = True

    def _shared(self, module: nn.Module, values: tuple[Any, ...], plan: Plan, key: Any) -> Specialization:
        """A variant that another module has recorded, or else a new one."""
        if self.beneath is not None:
            assert self.rewrite is not None
            with as_before(self.rewrite.action, module):
                beneath = self.beneath.variant(module, values)
            return self._repeated(beneath, module, plan)
        exact = self._exact(module, values, key)
        found = self.pool.find(exact, module)
        if found is None:
            found = self._recorded(module, values, plan)
            self.pool.add(exact, module, found)
        return found

    def _exact(self, module: nn.Module, values: tuple[Any, ...], key: tuple[Any, ...]) -> Any:
        """Return the key of a recording, besides attributes and global names."""
        return (
            self.forward,
            type(self.tracer),
            self.leaves,
            key[1:],
            exact_form(values),
            module_index.structure(module),
        )

    def _recorded(self, module: nn.Module, values: tuple[Any, ...], plan: Plan) -> Specialization:
        """A new variant for calls with ``values`` of the parameters."""
        named = zip(self.parameters.names, values, strict=True)
        arguments = {name: value for name, value in named if value is not MISSING}
        modules = plan.modules_of(module)
        assert modules is not None
        with PATCHING:
            names = GlobalNames(self.forward, modules[: len(plan.paths)])
            try:
                with names.kept(), buffers_kept(module):
                    forward = refusing_changes(self.forward, names)
                    recorded = self.tracer.trace(module, forward, arguments, self.leaves)
                    if not any("example" in node.meta for node in recorded.graph.nodes):  # by a plugin
                        with drawn_back(), attributes_kept(module, (), Untraceable):
                            observe(recorded.graph, module, (*recorded.captured, *arguments.values()))
            except Exception as error:
                refused = refusal(error, self.tracer, self.path)
                read = getattr(error, "slapo_read", None)
                if read is not None:
                    refused.slapo_read = (*read, *names.flags)  # type: ignore[attr-defined]
                raise refused from error
        return Specialization(recorded, plan, surroundings=names.flags)

    @property
    def _where(self) -> str:
        return f"'{self.path}'" if self.path else "the root"

    def __getstate__(self) -> dict[str, Any]:
        names = ("forward", "tracer", "leaves", "path", "pool", "beneath", "rewrite")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _surroundings() -> tuple[Any, ...]:
    """Return what decides outside of a model how a call computes; as a part of the key of :class:`TracedForward`."""
    return (
        torch.is_grad_enabled(),
        autocast_state.state() if is_any_autocast_enabled() else None,
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
    )


def graph_of(node: Node) -> TracedForward | None:
    """The static graph that runs as the module's forward; None if the module is not traced."""
    graph = node.state.get("forward")
    if not isinstance(graph, TracedForward):
        return None
    graph.look(node.module)
    return graph


def _shared_out(rewrite: Rewrite, graphs: Sequence[tuple[TracedForward, nn.Module]]) -> list[Rewrite | None]:
    """Split a rewrite among the graphs that now hold its matches.

    Raises:
        TraceError: they are others than they were.
    """
    counts = []
    for graph, module in graphs:
        assert graph.first is not None
        counts.append(len(places_of(rewrite.pattern, graph.first.recorded, module)[0]))
    is_whole = len(rewrite.indices) == rewrite.total and len(set(rewrite.captured)) == 1
    if sum(counts) != rewrite.total or not (is_whole or counts[0] == rewrite.total):
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
