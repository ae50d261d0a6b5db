"""``decompose``: show the pieces of a module's arithmetic to patterns, such as the bias of a Linear."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slapo_core import Edit, Equivalence, Node, Primitive, Violation
from slapo_core.spec.edit import wrappers_around
from slapo_fusion.replacing import carry_hooks, steps_hooks, users_changes

if TYPE_CHECKING:
    from slapo_core.testing import Case

__all__ = ["Decompose", "slapo_cases"]


@dataclass(frozen=True)
class Decompose(Primitive):
    """Take a module's arithmetic apart, so that ``trace(flatten=True)`` around it, and then patterns, see the pieces.

    For ``nn.Linear``, ``nn.LayerNorm`` and ``nn.BatchNorm1d`` to ``3d``. Parameters and the state dict stay the same.
    What steps put at the module goes with it, into the place where it belongs: of a row-split Linear the all-reduce
    comes between the product and the bias. So split and synchronise first, and decompose then.

    Raises:
        PreconditionError: a module of another class, one whose forward or hooks were changed outside of the schedule,
            one split on its input axis and not synchronised yet; or the root of the model.

    rewrite:
        ``y = linear(x)`` -> ``y = matmul(x, weight.t()) + bias``

        row-split and synchronised: ``y = linear(x)`` -> ``y = all_reduce(matmul(x, weight.t())) + bias``

        ``y = norm(x)`` -> ``y = normalised(x) * weight + bias``

    Source: paper appendix A, ``.decompose()``.
    """

    name = "fusion.decompose"
    equivalence = Equivalence.REORDERED

    def preconditions(self, node: Node) -> Iterator[Violation]:
        from slapo_fusion.decomposed import KINDS

        module = node.module
        if not node.path:
            yield Violation("the root of the model cannot be replaced", "decompose its children")
            return
        if type(module) in KINDS.values():
            yield Violation("the module is decomposed already", "remove this second call")
            return
        if type(module) not in KINDS:
            known = ", ".join(f"nn.{kind.__name__}" for kind in KINDS)
            yield Violation(f"it knows no pieces of a {type(module).__name__}", f"it knows those of {known}")
            return
        yield from users_changes(node, "decompose")
        for kind, function, _ in steps_hooks(node):
            if kind not in ("forward_pre", "forward"):
                yield Violation(f"the {kind} hook {function} runs around the whole module", "decompose others only")
        row_split = _is_row_split(node)
        if row_split and not any(kind == "forward" for kind, _ in node.hooks):
            yield Violation(
                "its weight is split on its input axis, and nothing sums the ranks' outputs yet",
                'write sync("fwd_post", "all_reduce") before',
            )
        if node.graph is not None or len(node.wrappers) > row_split + len(wrappers_around(node)):
            by = next((str(record) for record in reversed(node.records) if record.effects), "a step")
            yield Violation(f"its forward was changed, by {by}, and that would be lost", "decompose before that step")

    def apply(self, node: Node, edit: Edit) -> None:
        from slapo_fusion.decomposed import decomposed

        hooks, wrappers = steps_hooks(node), wrappers_around(node)
        new = decomposed(
            node.module,
            before=tuple(function for kind, function, is_active in hooks if kind == "forward_pre" and is_active),
            after=tuple(function for kind, function, is_active in hooks if kind == "forward" and is_active),
            adds_bias=not any(is_active for kind, _, is_active in hooks if kind == "forward" and _is_row_split(node)),
        )
        edit.replace_module(node, new)
        carry_hooks(tuple((kind, function, False) for kind, function, is_active in hooks if not is_active), node, edit)
        for wrapper, is_active in wrappers:
            edit.wrap_forward(node, wrapper, active=is_active)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        from slapo_fusion.decomposed import KINDS

        if type(node.module) not in KINDS.values():
            yield Violation("the module is not decomposed")


def _is_row_split(node: Node) -> bool:
    """Whether each rank's product is a part of the sum: then the layer leaves its bias out, and its sync adds it."""
    from torch import nn

    if type(node.module) is not nn.Linear:
        return False
    return any(axis == 1 for _, axis in node.layout("weight").shards())


def slapo_cases() -> list[Case]:
    """For ``slapo plugins check``."""
    from slapo_core.testing import Case
    from slapo_fusion.cases import COMMON

    return [
        Case(Decompose(), path="0.up", rejects=[("0.dropout", Decompose()), ("", Decompose())], **COMMON),
        Case(Decompose(), path="1.norm", name="decompose-norm", **COMMON),
    ]
