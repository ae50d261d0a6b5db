"""``trace``: give a module a static graph, which runs in place of its forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slapo_core.spec.edit import Edit
from slapo_core.spec.equivalence import Equivalence
from slapo_core.spec.node import Node
from slapo_core.spec.primitive import Primitive
from slapo_core.spec.violation import Violation

__all__ = ["Trace"]

_TRACERS = ("auto", "record")


@dataclass(frozen=True)
class Trace(Primitive):
    """Record what the module's forward computes, and run that graph from now on.

    The module stays what it is: the same object, class, parameters, hooks and state dict. The forward runs once on
    tensors without values, and the torch calls it makes become the graph; calls of child modules stay calls. Sizes stay
    symbolic: the graph runs at other batch sizes and lengths. What the recorded code decided on - a size, a flag of the
    configuration - is checked at every call, and refused where it is not so; training and evaluation, and another
    pattern of arguments (None, types), are recorded anew when they are first met.

    Args:
        leaves: with ``flatten``: modules that stay calls, by path relative to the node, glob, or name of the class.
        flatten: whether child modules become part of the graph, all but those of ``torch.nn``, and but those that are
            hooked, or whose forward steps have changed.
        tracer: ``"record"``, or ``"auto"``, which is the same.
        example_inputs: what the module is called with: a mapping (keyword arguments), a tuple (positional ones), or one
            argument. None takes what it gets when the whole model runs on the schedule's example inputs.

    Raises:
        PreconditionError: the module is traced already, or has no forward of its own.
        TraceError: the forward branches on values of tensors, sets attributes, or does what else a graph cannot say.

    rewrite:
        ``y = module.forward(x)`` -> ``y = graph(module, x)``

    Source: paper section 3.2.2, ``.trace()``; ``torch/overrides.py``, ``torch/fx/graph.py``.
    """

    name = "core.trace"
    equivalence = Equivalence.EXACT

    leaves: tuple[str, ...] = ()
    flatten: bool = False
    tracer: str = "auto"
    example_inputs: Any = None

    def preconditions(self, node: Node) -> Iterator[Violation]:
        from torch import nn

        if self.tracer not in _TRACERS:
            yield Violation(f"there is no tracer '{self.tracer}'", f"tracer={_TRACERS[0]!r} or {_TRACERS[1]!r}")
        if self.leaves and not self.flatten:
            yield Violation(
                "leaves= says what flatten=True leaves alone; without it every child is a call", "flatten=True"
            )
        if node.graph is not None:
            yield Violation("the module is traced already", "undo that step first, or remove this call")
        if type(node.module).forward is nn.Module.forward and "forward" not in node.module.__dict__:
            yield Violation(
                f"{type(node.module).__name__} has no forward of its own: it is never called",
                f"trace its children: sch['{node.path}.*'].trace()",
            )

    def apply(self, node: Node, edit: Edit) -> None:
        from slapo_core.graph.leaves import Leaves
        from slapo_core.graph.traced import TracedForward
        from slapo_core.tree.forward import ModuleForward

        args, kwargs = self._call(node)
        graph = TracedForward(ModuleForward.of(node.module).bottom, Leaves(self.leaves, self.flatten), path=node.path)
        graph.record(node.module, args, kwargs)
        edit.set_graph(node, graph)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if node.graph is None:
            yield Violation("the module has no graph")

    def _call(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = self.example_inputs
        if given is None:
            return node.example_call()
        if isinstance(given, Mapping):
            return (), {str(name): value for name, value in given.items()}
        return given if isinstance(given, tuple) else (given,), {}
