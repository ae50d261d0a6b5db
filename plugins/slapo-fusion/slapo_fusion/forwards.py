"""The forward of a node: whether it has one of its own, and what steps wrapped around it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import nn

from slapo_core import Node, Violation


def is_wrapped_by(node: Node, kind: type) -> bool:
    """Return whether a step wrapped the node's forward in an object of this class."""
    return any(isinstance(wrapper, functools.partial) and wrapper.func is kind for wrapper in node.wrappers)


def missing_forward(node: Node, verb: str, step: str) -> Iterator[Violation]:
    """Refuse a container such as ``nn.ModuleList``, which is never called."""
    if type(node.module).forward is nn.Module.forward and "forward" not in node.module.__dict__:
        yield Violation(
            f"{type(node.module).__name__} has no forward of its own: it is never called",
            f"{verb} its children: sch['{node.path}.*'].{step}()",
        )
