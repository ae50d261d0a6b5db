"""`Variant`: a recorded graph with the code that runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import Any

from torch import nn

from slapo_core.graph import regions
from slapo_core.graph.code import compiled
from slapo_core.graph.guards import Checks
from slapo_core.graph.leaves import is_changed
from slapo_core.graph.plan import Plan
from slapo_core.spec.tracer import Flag, Recorded

__all__ = ["Variant"]


class Variant:
    """One graph of a traced module, as it runs.

    Args:
        recorded: the graph and what it holds for.
        plan: its structure.
        surroundings: global names that the recorded code reads.
        swallowed: modules that rewrites took out, which are called no more.
    """

    def __init__(
        self,
        recorded: Recorded,
        plan: Plan,
        surroundings: tuple[Flag, ...] = (),
        swallowed: tuple[str, ...] = (),
    ) -> None:
        self.recorded, self.plan, self.surroundings, self.swallowed = recorded, plan, surroundings, swallowed
        self.checks = Checks((*recorded.flags, *surroundings), plan.index)
        self.code = compiled(recorded.graph)
        self._rewritten: dict[Any, Variant] = {}
        self.used = 0  # when it was called last, as a number that grows
        self.has_regions = any(node.target is regions.set_state for node in recorded.graph.nodes)

    def rewritten_alike(self, rewrite: Hashable, module: nn.Module) -> Variant | None:
        """What a rewrite made of this variant for another module that shares it, if it would make the same again."""
        try:
            found = self._rewritten.get((rewrite, self._calls(module)))
        except TypeError:  # it holds a function that cannot be hashed
            found = None
        if found is None:
            return None
        modules = found.plan.modules_of(module)
        return found if modules is not None and found.checks.violated(modules) is None else None

    def keep_rewritten(self, rewrite: Hashable, module: nn.Module, made: Variant) -> None:
        """Remember what a rewrite made of this variant, for modules that share it."""
        with contextlib.suppress(TypeError):
            self._rewritten[(rewrite, self._calls(module))] = made

    def _calls(self, module: nn.Module) -> tuple[Any, ...]:
        """What a rewrite sees of the modules that the graph calls, besides flags."""
        calls = dict.fromkeys(str(node.target) for node in self.recorded.graph.nodes if node.op == "call_module")
        found = [module.get_submodule(path) for path in calls]
        return tuple((type(below), is_changed(below)) for below in found)

    def run(self, module: nn.Module, given: list[Any]) -> Any:
        """Call it.

        Args:
            module: as the forward takes it first.
            given: one value for each parameter of the forward that is not left out.

        Raises:
            GuardViolation: the graph is not valid for this call.
        """
        if not self.has_regions:
            return self.code(module, *self.recorded.captured, *given)
        before = regions.state()
        try:
            return self.code(module, *self.recorded.captured, *given)
        finally:
            regions.set_state(*before)
