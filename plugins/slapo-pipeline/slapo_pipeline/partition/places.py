"""To which stage every node of the flat graph belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from slapo_core.tracing import FlatGraph, left
from slapo_pipeline.partition.nodes import is_check, is_given, is_light, is_switch

__all__ = ["Places", "Uncuttable"]


class Uncuttable(Exception):  # noqa: N818 - becomes a TraceError that names the record
    """The model cannot be cut at a place.

    Args:
        path: of the module after which it was to be cut.
        problem: why not.
        hint: what to write instead.
        location: of the model.
    """

    def __init__(
        self, path: str, problem: str, hint: str | None = None, location: tuple[str, int] | None = None
    ) -> None:
        super().__init__(problem)
        self.path, self.problem, self.hint, self.location = path, problem, hint, location


class Places:
    """The stage of every node: calls stand where they were recorded, everything else as early as it can.

    Args:
        flat: the graph.
        cuts: paths of modules after whose calls it is cut, in any order.

    Attributes:
        position: the stage in which a node was recorded.
        order: the number of a node.
        cuts: paths, in the order in which their calls end.
        count: of stages.

    Raises:
        Uncuttable: a module is not called, or several times, or nothing comes after it.
    """

    def __init__(self, flat: FlatGraph, cuts: Sequence[str]) -> None:
        self.flat = flat
        self.cuts: list[str] = []
        self.position: dict[fx.Node, int] = {}
        for node in flat.graph.nodes:
            self.position[node] = len(self.cuts)
            path: Any = node.target if node.op == "call_module" else node.args[0] if node.target is left else None
            if path in cuts:
                if path in self.cuts:
                    raise Uncuttable(
                        path,
                        "the forward calls it more than once, and it is not known after which call to cut",
                        "cut after a module that is called once",
                        node.meta.get("location"),
                    )
                self.cuts.append(path)
        for path in cuts:
            if path not in self.cuts:
                raise Uncuttable(path, "the forward does not call it", "cut after a module that is called")
        self.count = len(self.cuts) + 1
        self.order = {node: number for number, node in enumerate(flat.graph.nodes)}
        self._homes: dict[fx.Node, int] = {}
        self._made: dict[fx.Node, bool] = {}
        for stage, path in enumerate(self.cuts):
            after = [node for node, position in self.position.items() if position == stage + 1]
            if not any(self.is_bound(node) and not is_switch(node) for node in after):
                problem = "nothing comes after it"
                if stage + 1 < len(self.cuts):
                    problem += f", before the cut after '{self.cuts[stage + 1]}'"
                raise Uncuttable(path, problem, "cut after an earlier module")

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

    def is_made(self, node: fx.Node) -> bool:
        """Whether it is computed of more than what every stage has."""
        known = self._made.get(node)
        if known is None:
            if is_given(node):
                known = False
            else:
                known = self.is_bound(node) or any(self.is_made(read) for read in node.all_input_nodes)
            self._made[node] = known
        return known

    def part(self, whole: fx.Node, how: str, key: Any, value: Any) -> fx.Node:
        """The node that takes a part out of what a call returned; a new one where the graph has none.

        Args:
            whole: gives a container.
            how: ``"item"`` or ``"attribute"``.
            key: of the part.
            value: the part.
        """
        import operator

        function = operator.getitem if how == "item" else getattr
        for user in whole.users:
            if user.target is function and user.args == (whole, key):
                self.flat.values.setdefault(user, value)
                return user
        with self.flat.graph.inserting_after(whole):
            made = self.flat.graph.call_function(function, (whole, key))
        made.meta.update(location=whole.meta.get("location"))
        self.flat.values[made] = value
        self.position[made], self.order[made] = self.position[whole], self.order[whole]
        return made
