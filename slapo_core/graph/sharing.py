"""Recordings that serve several modules: those that are proved to be recorded alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from slapo_core.graph.arguments import MISSING
from slapo_core.graph.guards import Checks
from slapo_core.graph.leaves import around, walk
from slapo_core.graph.structure import children, is_plain
from slapo_core.graph.variant import Variant
from slapo_core.spec.tracer import Flag, Recorded

__all__ = ["Pool", "exact_form", "is_pure", "structure"]


class Pool:
    """The recordings of several traced modules, to be asked before another one is made.

    One serves another module if both have the same structure, and every attribute that was read while it was recorded,
    by modules that stay calls too, is equal there: then the run that recorded it would have been the same run.
    """

    def __init__(self) -> None:
        self._entries: dict[Any, list[tuple[Checks, Variant | None]]] = {}

    def find(self, key: Any, module: nn.Module) -> Variant | None:
        """A variant for ``module``; ``key`` is what it was added under."""
        return next((found for found in self._alike(key, module) if found is not None), None)

    def fails(self, key: Any, module: nn.Module) -> bool:
        """Whether another module could not be recorded, in a run that would be the same for ``module``."""
        return None in self._alike(key, module)

    def _alike(self, key: Any, module: nn.Module) -> Iterator[Variant | None]:
        modules = [below for _, below in walk(module)]
        return (found for read, found in self._entries.get(key, ()) if read.violated(modules) is None)

    def add(self, key: Any, module: nn.Module, variant: Variant) -> None:
        """Remember a variant, if others can be proved to be like it."""
        recorded = variant.recorded
        if recorded.read is not None and is_pure(recorded):
            self._add(key, module, (*recorded.read, *variant.surroundings), variant)

    def add_failure(self, key: Any, module: nn.Module, read: tuple[Flag, ...]) -> None:
        """Remember that ``module`` cannot be recorded; ``read`` is what was read until it failed."""
        self._add(key, module, read, None)

    def _add(self, key: Any, module: nn.Module, read: tuple[Flag, ...], variant: Variant | None) -> None:
        index = {path: number for number, (path, _) in enumerate(walk(module))}
        self._entries.setdefault(key, []).append((Checks(read, index), variant))

    def __getstate__(self) -> dict[str, Any]:
        """Those who share it go on sharing it after a copy through pickle; graphs are recorded anew."""
        return {"_entries": {}}


def structure(root: nn.Module) -> Any:
    """What decides about a recording besides attributes: equal and hashable for modules of the same structure.

    Classes, modes, parameters and buffers with shape, dtype, device and whether they are trained, which of them are the
    same tensor, hooks, and forwards that were set on an instance.
    """
    numbers: dict[int, int] = {}
    found = []
    for path, module in walk(root):
        own = module.__dict__
        tensors = [
            (name, *_tensor(tensor, numbers))
            for table in (own["_parameters"], own["_buffers"], own)
            for name, tensor in table.items()
            if tensor is None or isinstance(tensor, torch.Tensor)
        ]
        steps: tuple[Any, ...] = ()
        if path:  # what is around the root runs outside of its graph
            steps = around(module)
        number = numbers.setdefault(id(module), len(numbers))
        found.append((path, type(module), number, module.training, tuple(own["_modules"]), tuple(tensors), steps))
    return tuple(found)


def _tensor(tensor: torch.Tensor | None, numbers: dict[int, int]) -> tuple[Any, ...]:
    if tensor is None:
        return (None,)
    number = numbers.setdefault(id(tensor), len(numbers))
    return (number, type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def exact_form(value: Any) -> Any:
    """An argument of a call as a recording may see it: with the sizes that guards are taken on."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.storage_offset(), value.device, value.requires_grad, value.is_leaf)
    if value is MISSING or isinstance(value, int | float):
        return value
    parts = children(value)
    return None if parts is None else tuple(exact_form(part) for _, _, part in parts)


def is_pure(recorded: Recorded) -> bool:
    """Whether the graph holds nothing of the module that it was recorded from."""
    if recorded.captured:
        return False
    return all(_is_constant(part) for node in recorded.graph.nodes for part in (*node.args, *node.kwargs.values()))


def _is_constant(part: Any) -> bool:
    if isinstance(part, fx.Node) or is_plain(part):
        return True
    if isinstance(part, tuple | list):
        return all(map(_is_constant, part))
    if isinstance(part, dict):
        return all(map(_is_constant, part.values()))
    return isinstance(part, slice) and all(map(_is_constant, (part.start, part.stop, part.step)))
