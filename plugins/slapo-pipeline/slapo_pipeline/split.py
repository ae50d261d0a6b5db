"""``pipeline_split``: where the model is cut into stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slapo_core import Edit, Equivalence, Node, Primitive, Violation

__all__ = ["PipelineSplit"]


@dataclass(frozen=True)
class PipelineSplit(Primitive):
    """Cut the model after this module: what comes later in the forward belongs to the next stage.

    It only marks the place. Stages are made when ``build``, ``verify`` or ``slapo_pipeline.stages`` need them; no
    ``trace()`` is needed before.

    rewrite:
        ``y = rest(module(x))`` -> ``stage 0: v = module(x)``, ``stage 1: y = rest(v)``

    Source: paper section 3.3.2, ``.pipeline_split()``.
    """

    name = "pipeline.pipeline_split"
    equivalence = Equivalence.EXACT

    def preconditions(self, node: Node) -> Iterator[Violation]:
        if node.parent is None:
            yield Violation("nothing comes after the whole model", 'sch["encoder.layer.5"].pipeline_split()')

    def apply(self, node: Node, edit: Edit) -> None:
        edit.note("the model is cut after it when stages are made")
