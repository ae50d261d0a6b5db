"""`Variant`: a recorded graph with the code that runs it."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from slapo_core.graph import regions
from slapo_core.graph.checks import Checks
from slapo_core.graph.plan import Plan
from slapo_core.graph.rewriting.swallowing import Swallowed
from slapo_core.spec.tracer import Flag, Recorded

__all__ = ["Variant"]


class Variant:
    """One graph of a traced module, as it runs.

    Args:
        recorded: the graph and what it holds for.
        module: the traced one, or one with the same names in it.
        plan: its structure.
        swallowed: modules that rewrites took out, which are called no more.
        surroundings: global names that the recorded code reads.
    """

    def __init__(
        self,
        recorded: Recorded,
        module: nn.Module,
        plan: Plan,
        swallowed: tuple[Swallowed, ...] = (),
        surroundings: tuple[Flag, ...] = (),
    ) -> None:
        self.recorded, self.plan, self.swallowed, self.surroundings = recorded, plan, swallowed, surroundings
        self.checks = Checks((*recorded.flags, *surroundings), plan.index)
        self.code = type(fx.GraphModule(module, recorded.graph)).forward
        self.has_regions = any(node.target is regions.set_state for node in recorded.graph.nodes)

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
