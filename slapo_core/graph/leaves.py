"""Which modules below a traced one stay calls."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["Leaves", "inlined_modules"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Leaves:
    """Decides for a module below the traced one whether it is called as it is, or its code becomes part of the graph.

    Args:
        patterns: paths relative to the traced module, globs over them, or names of classes: these are called.
        flatten: whether all others but those of ``torch.nn`` are looked into; without it every module is called.
    """

    patterns: tuple[str, ...] = ()
    flatten: bool = False

    def __call__(self, module: nn.Module, path: str) -> bool:
        """Whether ``module``, which lies at ``path`` below the traced one, is called as it is.

        One that is hooked, or whose forward was wrapped or set, is called: what runs around it stays in force.
        """
        if not self.flatten or _is_predefined(module) or is_changed(module):
            return True
        names = (path, type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}")
        return any(fnmatchcase(name, pattern) for pattern in self.patterns for name in names)


def is_changed(module: nn.Module) -> bool:
    """Whether more happens when ``module`` is called than its class's forward."""
    return bool(
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def inlined_modules(root: nn.Module, leaves: Leaves) -> dict[str, nn.Module]:
    """The modules whose own code is recorded, by path: the root, and what is no leaf and lies below none."""
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


def _is_predefined(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, (*_CONTAINERS, nn.Sequential))
