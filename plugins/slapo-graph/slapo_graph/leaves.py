"""The rule of which submodules of a traced module stay calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from slapo_core.internals import forwards
from slapo_core.observers import is_inlined
from slapo_graph.private import compiled_calls_of, hooks_of, is_changed as is_changed

LeafRule = Callable[[nn.Module, str], bool]
"""Whether a module, at a path relative to the traced one, stays a call."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Leaves:
    """Decide for each module below the traced one whether it stays a call or is inlined.

    Args:
        patterns: classes, class names, paths relative to the traced module, or globs over either: these stay calls.
        flatten: whether all others, except modules of ``torch.nn``, are inlined; otherwise every module stays a call.
        above: the path of the traced module from the origin of the paths in ``patterns``.
    """

    patterns: tuple[type | str, ...] = ()
    flatten: bool = False
    above: str = ""

    def __call__(self, module: nn.Module, path: str) -> bool:
        """Return whether the module at ``path`` below the traced one stays a call.

        A module that is hooked, or whose forward was wrapped or set, stays a call, unless a graph can hold its hooks
        and wrappers (``slapo_is_inlined``). So does a module with the attribute ``slapo_stays_a_call``, e.g. one of a
        step whose forward sets attributes.
        """
        if not self.flatten:
            return True
        if getattr(module, "slapo_stays_a_call", False):
            return True
        if is_changed(module):
            if not all(map(is_inlined, _parts(module))):
                return True
        elif is_predefined(module):
            return True
        return self.names(module, path)

    def names(self, module: nn.Module, path: str) -> bool:
        """Return whether one of the patterns names the module at ``path`` below the traced one."""
        path = f"{self.above}.{path}" if self.above else path
        names = (path, type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}")
        return any(
            isinstance(module, pattern)
            if isinstance(pattern, type)
            else any(fnmatchcase(name, pattern) for name in names)
            for pattern in self.patterns
        )


def _parts(module: nn.Module) -> list[Any]:
    forward = module.__dict__.get("forward")
    parts = forward.parts if isinstance(forward, forwards.ModuleForward) else () if forward is None else (forward,)
    return [*compiled_calls_of(module), *parts, *(hook for hooks in hooks_of(module) for hook in hooks.values())]


def inlined_modules(root: nn.Module, leaves: LeafRule) -> dict[str, nn.Module]:
    """Return the modules whose own code is recorded, by path."""
    found: dict[str, nn.Module] = {"": root}
    stack = [("", root)]
    while stack:
        path, module = stack.pop()
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            # A container is never called: its owner calls its children.
            if isinstance(child, _CONTAINERS) or not leaves(child, below):
                found[below] = child
                stack.append((below, child))
    return found


def is_predefined(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, (*_CONTAINERS, nn.Sequential))
