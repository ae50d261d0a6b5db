"""``annotate``: mark a parameter for an optimizer or a runtime."""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slapo_core.primitive import Equivalence, Primitive, Violation
from slapo_core.tree.edit import Edit
from slapo_core.tree.node import Node


@dataclass(frozen=True)
class Annotate(Primitive):
    """Set an attribute on a parameter; it follows the parameter through sharding, replacing and materializing.

    Runtimes and optimizers read such marks: Megatron-core's ``allreduce``, a ``no_weight_decay`` of your own.

    Args:
        param: the module's own parameter, e.g. ``"weight"``.
        key: the attribute's name.
        value: any value; only what JSON can carry can be saved with the schedule.

    Raises:
        PreconditionError: no such parameter; ``key`` is not an identifier, or is an attribute of every tensor.

    rewrite:
        ``module.weight`` -> ``module.weight`` with ``module.weight.<key> == value``

    Source: the reference implementation's ``annotate`` primitive; Megatron-core ``tensor_parallel/layers.py`` sets
    ``tensor_model_parallel`` on parameters in the same way.
    """

    name = "core.annotate"
    equivalence = Equivalence.EXACT

    param: str
    key: str
    value: Any

    def preconditions(self, node: Node) -> Iterator[Violation]:
        import torch

        if self.param not in node.parameters:
            known = ", ".join(f"'{name}'" for name in node.parameters) or "none of its own"
            yield Violation(f"the module has no parameter '{self.param}'", f"it has {known}")
        if not self.key.isidentifier() or keyword.iskeyword(self.key):
            yield Violation(f"key must be a Python identifier (got {self.key!r})", 'for example key="no_weight_decay"')
        elif hasattr(torch.Tensor, self.key):
            yield Violation(f"'{self.key}' is an attribute of every tensor", f"use another key, e.g. 'my_{self.key}'")

    def apply(self, node: Node, edit: Edit) -> None:
        edit.annotate(node, self.param, self.key, self.value)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if getattr(node.parameters[self.param], self.key, None) is not self.value:
            yield Violation(f"'{self.param}' does not carry {self.key}={self.value!r}")
