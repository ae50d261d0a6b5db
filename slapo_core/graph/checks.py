"""The flags of a graph, ready to be checked at every call."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from slapo_core.graph.tokens import ABSENT, same
from slapo_core.spec.tracer import Flag

__all__ = ["Checks"]


class Checks:
    """Flags, grouped by the objects that have them.

    Args:
        flags: of one recording.
        index: where the recorded modules stand in the list that :meth:`violated` is given, by path.
    """

    def __init__(self, flags: Iterable[Flag], index: Mapping[str, int]) -> None:
        groups: dict[Any, list[Flag]] = {}
        for flag in flags:
            if flag.owner is not None:
                groups.setdefault((flag.owner, flag.path), []).append(flag)
                continue
            depth = next(depth for depth in range(len(flag.path), -1, -1) if ".".join(flag.path[:depth]) in index)
            groups.setdefault((index[".".join(flag.path[:depth])], flag.path[depth:]), []).append(flag)
        self._groups = [
            (
                sys.modules.get(start) if isinstance(start, str) else start,
                holders,
                tuple((flag.attribute, flag.expected, flag) for flag in members),
            )
            for (start, holders), members in groups.items()
        ]

    def violated(self, modules: list[nn.Module]) -> tuple[Flag, Any] | None:
        """The first flag that is not as it was, and what it is now."""
        for start, holders, members in self._groups:
            owner: Any = modules[start] if type(start) is int else start
            for name in holders:
                owner = getattr(owner, name, ABSENT)
            own = owner.__dict__
            for name, expected, flag in members:
                found = own.get(name, ABSENT)
                if found is expected:
                    continue
                if found is ABSENT:
                    found = _of_class(owner, name) if isinstance(owner, nn.Module) else getattr(owner, name, ABSENT)
                if not same(found, expected):
                    return flag, found
        return None


def _of_class(module: nn.Module, name: str) -> Any:
    """An attribute that is none of the instance's; without the error that a module takes long to make."""
    for table in (module._parameters, module._buffers, module._modules):
        if name in table:
            return table[name]
    return getattr(module, name) if hasattr(type(module), name) else ABSENT
