"""``trace``: give a module a static graph, which runs in place of its forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slapo_core import Edit, Node
from slapo_core.errors import PathError, SlapoError, TraceError, UnknownNameError
from slapo_core.internals import Internals, children_of, forwards
from slapo_core.observers import goes_around
from slapo_core.primitive import Equivalence, Primitive, Record, Violation
from slapo_graph.example_calls import Call, call_with, example_call, example_calls, reference_calls
from slapo_graph.graph import TracedForward, graph_of
from slapo_graph.leaves import Leaves, is_predefined
from slapo_graph.protocol import Untraceable


@dataclass(frozen=True)
class Trace(Primitive):
    """Record the module's forward as a graph, and run that graph from now on.

    The module stays the same object, class, parameters, hooks and state dict. The forward runs once on
    tensors without values, and the torch calls it makes become the graph; calls of child modules stay calls. Sizes stay
    symbolic: the graph runs at other batch sizes and lengths. Size-dependent decisions of the recorded code are checked
    at every call, and another decision is refused. Training and evaluation, other types of arguments, and
    another value of an attribute or global name that the code read are recorded again when they first occur. Between
    the steps of a split, where the module cannot run, the graph is that of before the split, and follows after it.

    Args:
        leaves: with ``flatten`` or ``recursive``: modules that stay calls, by class, class name, path relative to
            the node, or glob over either; one or several.
        flatten: whether child modules are inlined. Modules of ``torch.nn``, hooked modules, and modules with a
            changed forward stay calls. Modules that steps only wrapped (``checkpoint``, ``compile``, ``fork_rng``) get
            graphs of their own, in which patterns are found as well.
        recursive: whether modules that stay calls, and the modules that they call, get graphs of their own; not
            modules of ``torch.nn``, modules that ``leaves`` names, and traced modules.
        tracer: the name of a tracer: ``"record"``, or a plugin's.
        example_inputs: arguments of the module: a mapping (keyword arguments), a tuple (positional ones), or one
            argument. None records them while the entire model runs on the schedule's example inputs: the reference
            model, or, if the steps changed the module's signature, the scheduled one.

    Raises:
        PreconditionError: the module is traced already, or has no forward of its own.
        ArgumentError: the module's arguments are unknown.
        UnknownNameError: no plugin provides the tracer.
        TraceError: the forward branches on values of tensors, sets attributes, or does what else a graph cannot say.

    rewrite:
        ``y = module.forward(x)`` -> ``y = graph(module, x)``, with ``recursive`` also at the modules that it calls

    Source: paper section 3.3, ``.trace()``; ``torch/overrides.py``, ``torch/fx/graph.py``.
    """

    name = "graph.trace"
    equivalence = Equivalence.EXACT

    leaves: type | str | tuple[type | str, ...] = ()
    flatten: bool = False
    tracer: str = "record"
    example_inputs: Any = None
    recursive: bool = False

    def preconditions(self, node: Node) -> Iterator[Violation]:
        from torch import nn

        try:
            node.plugin("tracers", self.tracer)
        except UnknownNameError as error:
            plugins = Internals(node.schedule).registry.plugins
            known = {entry.name for each in plugins for entry in each.entries if entry.kind == "tracers"}
            error.hint = f"installed tracers: {', '.join(map(repr, sorted(known)))}; trace() takes 'record'"
            raise
        for leaf in self._leaves():
            if isinstance(leaf, type) and not issubclass(leaf, nn.Module):
                yield Violation(f"leaves= names modules, and {leaf.__qualname__} is not a module class", "nn.Linear")
        if self.leaves and not self.flatten and not self.recursive:
            yield Violation(
                "leaves= has no effect without flatten=True or recursive=True: every child is a call",
                "flatten=True",
            )
        if node.forward_is_replaced:
            yield Violation("the module is traced already", "undo that step first, or remove this call")
        if type(node.module).forward is nn.Module.forward and "forward" not in node.module.__dict__:
            yield Violation(
                f"{type(node.module).__name__} has no forward of its own: it is never called",
                f"trace its children: sch['{node.path}.*'].trace()",
            )

    def apply(self, node: Node, edit: Edit) -> None:
        calls: Mapping[str, Call] = {}  # by path from here; the schedule knows others
        if self.example_inputs is not None:
            given = call_with(self.example_inputs)
            calls = reference_calls(node.module, self.example_inputs)[0] if self.recursive else {"": given}
        self._trace(node, "", calls, edit)

    def _trace(self, node: Node, path: str, calls: Mapping[str, Call], edit: Edit) -> None:
        """Set the graph of ``node``, at ``path`` below the primitive's node."""
        tracer = node.plugin("tracers", self.tracer)()
        forward = forwards.ModuleForward.of(node.module).bottom
        leaves = Leaves(self._leaves(), self.flatten, path)
        peer = next((graph for graph in _graphs_of_peers(node) if isinstance(graph, TracedForward)), None)
        pool = peer.pool if peer is not None else None
        graph = TracedForward(forward, tracer, leaves, path=node.path, pool=pool)
        try:
            graph.record(node.module, [calls[path]] if path in calls else example_calls(node))
        except TraceError as error:
            if not (_is_between_steps(node, error) and _recorded_before(graph, node, calls.get(path))):
                raise
            edit.note(
                "recorded as before the first step of a split, and again after the last: it cannot run in between"
            )
        self._set(node, edit, graph)
        for name in graph.called if self.recursive else ():
            child = node[name]
            if (
                not child.forward_is_replaced
                and not is_predefined(child.module)
                and not leaves.names(child.module, name)
            ):
                self._trace(child, f"{path}.{name}".lstrip("."), calls, edit)

    def _set(self, node: Node, edit: Edit, graph: TracedForward) -> None:
        """Let the graph run; modules below that steps wrapped run graphs of their own within the wrappers."""
        edit.set_forward(node, graph)
        closed = ""
        for below in node.walk() if self.flatten else ():
            if below.path == node.path or (closed and below.path.startswith(f"{closed}.")):
                continue
            if below.forward_is_replaced:
                closed = below.path
            elif below.wrappers and all(map(goes_around, below.wrappers)):
                relative = below.path.removeprefix(f"{node.path}.") if node.path else below.path
                if not graph.leaves(below.module, relative):
                    continue  # a graph can hold its wrappers
                inner = graph.graph_of_child(relative, below.module, functools.partial(example_call, below))
                if inner is not None:
                    edit.set_forward(below, inner)
                closed = below.path

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if not node.forward_is_replaced:
            yield Violation("the module has no graph")

    def _leaves(self) -> tuple[type | str, ...]:
        return self.leaves if isinstance(self.leaves, tuple) else (self.leaves,)


def _is_between_steps(node: Node, error: TraceError) -> bool:
    """Return whether the forward fails with a sharded tensor, whose other steps may follow."""
    if isinstance(error.__cause__, (Untraceable, SlapoError)):
        return False  # the recording was refused; the forward did not raise
    return any(
        below.layout(name).is_sharded
        for below in node.walk()
        for name, tensor in (*below.parameters.items(), *below.buffers.items())
        if tensor is not None
    )


def _recorded_before(graph: Any, node: Node, call: Call | None) -> bool:
    """Record the module as it was when it last could run; later steps record it again."""
    for before in sorted({record.index - 1 for record in _changes(node)}, reverse=True):
        with contextlib.suppress(TraceError, PathError), node.reference(to=before) as module:
            graph.record(module, [example_call(node) if call is None else call])
            return True
    return False


def _changes(node: Node) -> list[Record]:
    """Return the steps at the module, around it, and below."""
    found = list(node.records_below())
    here: Node | None = node
    while here is not None:
        found += here.records
        here = here.parent
    return found


def _graphs_of_peers(node: Node) -> Iterator[Any]:
    """Yield the graphs of the same child of other layers."""
    below = ""
    here: Node | None = node
    while here is not None and here.parent is not None:
        for sibling in here.parent.children:
            if sibling.path != here.path and type(_module_at(sibling, below)) is type(node.module):
                yield graph_of(sibling[below])
        below = f"{here.path.rpartition('.')[2]}.{below}".rstrip(".")
        here = here.parent


def _module_at(node: Node, below: str) -> Any:
    module: Any = node.module
    for name in below.split(".") if below else ():
        module = children_of(module).get(name) if module is not None else None
    return module
