"""Recordings that serve several modules: those that are proved to be recorded alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx, nn
from torch.fx.node import map_aggregate

from slapo_core.internals import module_index
from slapo_graph.guards import Checks
from slapo_graph.protocol import Flag, Recorded
from slapo_graph.specialization import Specialization
from slapo_graph.structure import is_plain


class Pool:
    """Pool the recordings of several traced modules.

    A recording serves another module of the same structure if every attribute that was read, by called modules too, is
    equal there: then its recording would be the same.
    """

    def __init__(self) -> None:
        self._entries: dict[Any, list[tuple[Checks, Specialization | None]]] = {}

    def find(self, key: Any, module: nn.Module) -> Specialization | None:
        """Return a variant for ``module`` that was added under ``key``; None if there is none."""
        return next((found for found in self._alike(key, module) if found is not None), None)

    def fails(self, key: Any, module: nn.Module) -> bool:
        """Return whether an equal module could not be recorded."""
        return None in self._alike(key, module)

    def _alike(self, key: Any, module: nn.Module) -> Iterator[Specialization | None]:
        modules = [below for _, below in module_index.walk(module)]
        return (found for read, found in self._entries.get(key, ()) if read.violated(modules) is None)

    def add(self, key: Any, module: nn.Module, variant: Specialization) -> None:
        """Remember a variant if equality of others can be proved."""
        recorded = variant.recorded
        if recorded.read is not None and is_pure(recorded):
            self._add(key, module, (*recorded.read, *variant.surroundings), variant)

    def add_failure(self, key: Any, module: nn.Module, read: tuple[Flag, ...]) -> None:
        """Remember that ``module`` cannot be recorded; ``read`` is what was read until it failed."""
        self._add(key, module, read, None)

    def _add(self, key: Any, module: nn.Module, read: tuple[Flag, ...], variant: Specialization | None) -> None:
        index = {path: number for number, (path, _) in enumerate(module_index.walk(module))}
        self._entries.setdefault(key, []).append((Checks(read, index), variant))

    def __getstate__(self) -> dict[str, Any]:
        """Drop the recordings: graphs are recorded again after unpickling."""
        return {"_entries": {}}


def is_pure(recorded: Recorded) -> bool:
    """Return whether a graph holds no object of its module."""
    if recorded.captured:
        return False
    constants: list[Any] = []
    for node in recorded.graph.nodes:
        map_aggregate((node.args, node.kwargs), constants.append)
    return all(isinstance(constant, fx.Node) or is_plain(constant) for constant in constants)
