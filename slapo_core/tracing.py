"""Recording a module for a plugin that makes something else of its graph than a forward: stages of a pipeline, say.

:func:`flat` records what a module computes, with a rule of which modules below stay calls, and keeps what the run
showed about every node. :func:`compiled` makes a function of a graph that was built of its nodes. What the graph takes
for granted is in it as calls of ``check``, and in :meth:`FlatGraph.require`, which whoever runs it calls before.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from slapo_core.errors import GuardError
from slapo_core.graph.checks import Checks
from slapo_core.graph.fake import with_own_values
from slapo_core.graph.leaves import inlined_modules, is_changed
from slapo_core.graph.mutations import refusing_changes
from slapo_core.graph.notes import Notes, left
from slapo_core.graph.recorder import NeedsValues
from slapo_core.graph.refusals import refusal
from slapo_core.graph.regions import set_state, state
from slapo_core.graph.structure import Opaque, children, concrete, rebuild
from slapo_core.graph.surroundings import Surroundings
from slapo_core.graph.tokens import describe, token
from slapo_core.graph.tracers.record import RecordTracer, record
from slapo_core.spec.tracer import Flag, GuardViolation, Recorded, Untraceable, check

__all__ = [
    "FlatGraph",
    "GuardViolation",
    "Opaque",
    "check",
    "children",
    "compiled",
    "concrete",
    "flat",
    "is_plain_call",
    "left",
    "rebuild",
    "set_state",
    "state",
]


@dataclass(frozen=True)
class FlatGraph:
    """What a module computes, recorded once.

    Args:
        module: the recorded one.
        recorded: the graph, with its guards and captured tensors.
        notes: what the run showed: ``values``, ``writes`` and ``storages`` of nodes.
        inlined: the modules whose own code is part of the graph, by path.
        state: gradients and autocast, as they were outside.
    """

    module: nn.Module
    recorded: Recorded
    notes: Notes
    inlined: Mapping[str, nn.Module]
    state: Any
    _surroundings: tuple[Flag, ...] = field(repr=False)

    def __post_init__(self) -> None:
        index = {path: number for number, path in enumerate(self.inlined)}
        checks = Checks((*self.recorded.flags, *self._surroundings), index)
        object.__setattr__(self, "_checks", checks)

    def require(self) -> None:
        """Raise if what the recorded code read of the model and its files is not what it was.

        Raises:
            GuardError: an attribute or a global name has another value.
        """
        violated = self._checks.violated(list(self.inlined.values()))  # type: ignore[attr-defined]
        if violated is not None:
            flag, found = violated
            raise GuardError(
                f"recorded with {flag.name} == {describe(flag.expected)}, and now it is {describe(token(found))}",
                hint="ask for the stages again after changing it",
            )

    def violated(self, violation: GuardViolation) -> GuardError:
        """The error for a call of ``check`` in the graph that found something else."""
        guard = self.recorded.guards[violation.index]
        return GuardError(
            f"recorded with {guard.value} == {guard.expected!r}, and this call has {violation.found!r}",
            location=guard.location,
            hint="the model decides there what to compute: ask for the stages with a batch like this one",
        )


def flat(
    module: nn.Module,
    forward: Callable[..., Any],
    arguments: Mapping[str, Any],
    leaves: Callable[[nn.Module, str], bool],
    *,
    path: str = "",
) -> FlatGraph:
    """Record a module with its own rule of what stays a call.

    Args:
        module: the module.
        forward: takes the module first.
        arguments: by parameter of the forward, without those that are left out. Tensors may be without values.
        leaves: says of a module below, and its path, whether it stays a call.
        path: of the module, for messages.

    Raises:
        TraceError: it cannot be recorded.
    """
    inlined = inlined_modules(module, leaves)
    surroundings = Surroundings(forward, inlined.values())
    own = refusing_changes(forward)
    before = state()
    changed = None
    try:
        try:
            recorded, notes = _recorded(module, own, arguments, leaves)
        finally:
            changed = surroundings.put_back()
        if changed is not None:
            raise Untraceable(f"changes the global name {changed}")
    except Exception as error:
        raise refusal(error, RecordTracer(), path) from error
    return FlatGraph(module, recorded, notes, inlined, before, surroundings.flags)


def _recorded(module: nn.Module, forward: Any, arguments: Any, leaves: Any) -> tuple[Recorded, Notes]:
    notes = Notes()
    try:
        return contextvars.Context().run(record, module, forward, arguments, leaves, notes=notes), notes
    except (NeedsValues, RuntimeError, NotImplementedError) as error:
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            raise
        notes, real = Notes(), with_own_values(dict(arguments))
        try:
            with torch.random.fork_rng():
                run = contextvars.Context().run
                return run(record, module, forward, real, leaves, fake=False, notes=notes), notes
        except (NeedsValues, RuntimeError, NotImplementedError):
            raise error from None


def compiled(graph: fx.Graph, module: nn.Module) -> Callable[..., Any]:
    """A function of ``module`` and the graph's placeholders, in order; names in it are looked up in the module.

    Args:
        graph: its calls of modules and reads of parameters are named relative to ``module``.
        module: has them.
    """
    return type(fx.GraphModule(module, graph)).forward


def is_plain_call(module: nn.Module) -> bool:
    """Whether nothing but its class's forward happens when ``module`` is called."""
    return not is_changed(module)
