"""To which stage every node of the flat graph belongs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from slapo_core.tracing import FlatGraph, left
from slapo_pipeline.partition.nodes import is_check, is_given, is_light, is_switch

__all__ = ["Places", "Uncuttable"]


class Uncuttable(Exception):  # noqa: N818 - becomes a TraceError that names the record
    """The model cannot be cut at a place.

    Args:
        path: of the module after which it was to be cut; None where it is not one cut's fault.
        problem: why not.
        hint: what to write instead.
        location: of the model.
    """

    def __init__(
        self, path: str | None, problem: str, hint: str | None = None, location: tuple[str, int] | None = None
    ) -> None:
        super().__init__(problem)
        self.path, self.problem, self.hint, self.location = path, problem, hint, location


class Places:
    """The stage of every node: calls stand where they were recorded, everything else as early as it can.

    Args:
        flat: the graph.
        cuts: paths of modules after whose calls it is cut, in any order.
    """

    def __init__(self, flat: FlatGraph, cuts: Sequence[str]) -> None:
        self.flat = flat
        self.order: list[str] = []
        self.position: dict[fx.Node, int] = {}
        for node in flat.recorded.graph.nodes:
            self.position[node] = len(self.order)
            path = node.target if node.op == "call_module" else node.args[0] if node.target is left else None
            if isinstance(path, str) and path in cuts:
                if path in self.order:
                    problem = "the forward calls it more than once, and it is not known after which call to cut"
                    raise Uncuttable(path, problem, "cut after a module that is called once")
                self.order.append(path)
        for path in cuts:
            if path not in self.order:
                raise Uncuttable(path, "the forward does not call it", "cut after a module that is called")
        self.count = len(self.order) + 1
        self._homes: dict[fx.Node, int] = {}
        last = (node for node in self.position if self.position[node] == self.count - 1)
        if not any(self.is_bound(node) and not is_switch(node) for node in last):
            raise Uncuttable(self.order[-1], "nothing comes after it", "cut after an earlier module")

    def is_bound(self, node: fx.Node) -> bool:
        """Whether it runs in one stage, where it was recorded; other nodes are made again wherever they are needed."""
        if is_given(node) or is_check(node) or node.op == "output" or node.target is left:
            return False
        return not is_light(node, self.flat)

    def home(self, node: fx.Node) -> int:
        """The first stage in which it can be computed."""
        known = self._homes.get(node)
        if known is None:
            if self.is_bound(node):
                known = self.position[node]
            else:
                known = max((self.home(read) for read in node.all_input_nodes), default=0)
            self._homes[node] = known
        return known
