"""`Calls`: what steps put around the calls of modules, whether it runs on this mesh or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.spec.edit import Forward, HookKind
    from slapo_core.spec.graph import Graph


@dataclass(frozen=True, eq=False)
class CallChange:
    """A hook, or a wrapper around the forward; two with the same function are two."""

    kind: HookKind | Literal["wrapper"]
    function: Callable[..., Any]


class Calls:
    """Made with the tree, written by journal entries.

    Kept by the module's identity and not on the module: what does not run on this mesh leaves no trace there. A module
    that nobody else holds any more is forgotten.
    """

    def __init__(self) -> None:
        self._changes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._graphs: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def wrappers(self, module: nn.Module) -> tuple[Callable[[Forward], Forward], ...]:
        """The wrappers around the module's forward, innermost first."""
        return tuple(change.function for change in self._of(module) if change.kind == "wrapper")

    def hooks(self, module: nn.Module) -> tuple[tuple[HookKind, Callable[..., Any]], ...]:
        """The module's hooks; those of one kind in the order in which they run."""
        return tuple((change.kind, change.function) for change in self._of(module) if change.kind != "wrapper")

    def add(self, module: nn.Module, change: CallChange, *, first: bool = False) -> None:
        changes = self._changes.setdefault(module, [])
        changes.insert(0 if first else len(changes), change)

    def remove(self, module: nn.Module, change: CallChange) -> None:
        """Nothing happens if it is not there."""
        left = [one for one in self._of(module) if one is not change]
        if left:
            self._changes[module] = left
        else:
            self._changes.pop(module, None)

    def graph(self, module: nn.Module) -> Graph | None:
        """The static graph that runs as the module's forward; None if it runs the forward itself."""
        found: Graph | None = self._graphs.get(module)
        return found

    def set_graph(self, module: nn.Module, graph: Graph | None) -> Graph | None:
        """Note another graph, or none; the one before."""
        before = self.graph(module)
        if graph is None:
            self._graphs.pop(module, None)
        else:
            self._graphs[module] = graph
        return before

    def _of(self, module: nn.Module) -> list[CallChange]:
        changes: list[CallChange] = self._changes.get(module, [])
        return changes
