"""Which submodules of a traced module stay calls."""

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
    """Decides for a module below the traced one whether it is called as it is, or its code becomes part of the graph.

    Args:
        patterns: classes, names of classes, paths relative to the traced module, or globs over either: these are
            called.
        flatten: whether the code of all others but those of ``torch.nn`` is recorded; else every module is called.
        above: the path of the traced module, relative to the module that the paths in ``patterns`` are relative to.
    """

    patterns: tuple[type | str, ...] = ()
    flatten: bool = False
    above: str = ""

    def __call__(self, module: nn.Module, path: str) -> bool:
        """Whether ``module``, which lies at ``path`` below the traced one, is called as it is.

        One that is hooked, or whose forward was wrapped or set, is called: what runs around it stays in force. Only
        what steps put there that a graph can hold is looked into (``slapo_is_inlined``). So is a module that says
        ``slapo_stays_a_call``, as one that a step puts there does if its forward sets attributes.
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
        """Whether one of the patterns names ``module``, which lies at ``path`` below the traced one."""
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
            # A container is never called: whoever holds it calls its children.
            if isinstance(child, _CONTAINERS) or not leaves(child, below):
                found[below] = child
                stack.append((below, child))
    return found


def is_predefined(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, (*_CONTAINERS, nn.Sequential))
