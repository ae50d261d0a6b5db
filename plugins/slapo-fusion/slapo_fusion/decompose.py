"""``decompose``: show the pieces of a module's arithmetic to patterns, such as the bias of a Linear."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slapo_core import Edit, Equivalence, Node, Primitive, Violation
from slapo_core.spec.edit import Carried
from slapo_fusion.bind import is_bound

if TYPE_CHECKING:
    from slapo_core.testing import Case

__all__ = ["Decompose", "slapo_cases"]


@dataclass(frozen=True)
class Decompose(Primitive):
    """Take a module's arithmetic apart, so that ``trace(flatten=True)`` around it, and then patterns, see the pieces.

    For ``nn.Linear``, ``nn.LayerNorm`` and ``nn.BatchNorm1d`` to ``3d``. Parameters and the state dict stay the same.
    What steps put at the module stays there, and steps that follow treat it as the module that it was: of a row-split
    Linear the bias comes behind the all-reduce, whether it was split before or is split then.

    Raises:
        PreconditionError: a module of another class, one that is traced or bound to a kernel, one whose forward was
            set outside of the schedule; or the root of the model.

    rewrite:
        ``y = linear(x)`` -> ``y = matmul(x, weight.t()) + bias``

        row-split and synchronized: ``y = linear(x)`` -> ``y = all_reduce(matmul(x, weight.t())) + bias``

        ``y = norm(x)`` -> ``y = normalized(x) * weight + bias``

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
        if node.graph is not None:
            yield Violation("it is traced, and its graph would be lost", "decompose before trace()")
        elif getattr(forward := module.__dict__.get("forward"), "has_own", forward is not None):
            yield Violation(
                "the module's forward was set outside of the schedule, and would be lost", "set it in a class instead"
            )
        if any(is_bound(wrapper) for wrapper in node.wrappers):
            yield Violation("a kernel bound by bind() runs in the place of its forward", "leave one of the two out")

    def apply(self, node: Node, edit: Edit) -> None:
        from slapo_fusion.decomposed import decomposed

        new = decomposed(node.module)
        carried = Carried.of(node, new, is_same=True)
        edit.replace_module(node, new)
        carried.over(node, edit)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        from slapo_fusion.decomposed import KINDS

        if type(node.module) not in KINDS.values():
            yield Violation("the module is not decomposed")


def slapo_cases() -> list[Case]:
    """For ``slapo plugins check``."""
    from slapo_core.testing import Case
    from slapo_fusion.cases import COMMON

    return [
        Case(Decompose(), path="0.up", rejects=[("0.dropout", Decompose()), ("", Decompose())], **COMMON),
        Case(Decompose(), path="1.norm", name="decompose-norm", **COMMON),
    ]
