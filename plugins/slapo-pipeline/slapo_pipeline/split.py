"""The primitive `pipeline_split`: mark the modules after which the model is cut into stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slapo_core import Edit, Equivalence, Node, Primitive, Violation
from slapo_core.effects import Collective, Effect
from slapo_pipeline.rules import above_violations, place_violations, root_of, unanswered_violations

if TYPE_CHECKING:
    from slapo_core.primitive import Record


@dataclass(frozen=True)
class PipelineSplit(Primitive):
    """Cut the model after this module: later calls of the forward belong to the next stage.

    With ``stages``, cut the list of blocks in the module, or the module itself, into balanced stages: the cut between
    blocks that minimizes the largest stage.

    It only marks the cut. Stages are made when ``build``, ``verify`` or ``slapo_pipeline.stages`` need them; no
    ``trace()`` is needed before.

    Args:
        stages: number of stages; None cuts once, after the module itself. With ``pp`` in the mesh a multiple of its
            size: several stages on a rank are virtual stages.
        balance: cost that is balanced, measured on the reference model, so that earlier steps do not matter.
            ``"parameters"``: number of elements; a parameter that a stage uses in several places counts once in it.
            ``"flops"``: operations of the forward. Layers before the blocks count towards the first stage, layers
            after them towards the last, up to the next cut. Without the schedule's example inputs only
            ``"parameters"`` is possible, in the order in which modules are registered.
        after: the blocks after which the model is cut, as paths relative to the module. Found when the step is first
            applied, and recorded: a saved schedule cuts there again.

    rewrite:
        ``y = rest(module(x))`` -> ``stage 0: v = module(x)``, ``stage 1: y = rest(v)``

        ``stages=2, 12 blocks``: ``y = rest(b11(...b0(first(x))))`` -> ``stage 0: v = b5(...b0(first(x)))``,
        ``stage 1: y = rest(b11(...b6(v)))``

    Source: paper section 3.3.2, ``.pipeline_split()``.
    """

    name = "pipeline.pipeline_split"
    equivalence = Equivalence.EXACT

    stages: int | None = None
    balance: Literal["parameters", "flops"] = "parameters"
    after: tuple[str, ...] | None = dataclasses.field(default=None, kw_only=True)

    def cuts(self, path: str) -> tuple[str, ...]:
        """Return the full paths of the modules after which this step, applied at ``path``, cuts."""
        if self.stages is None:
            return (path,)
        return tuple(f"{path}.{below}" if path else below for below in self.after or ())

    def bind(self, node: Node) -> PipelineSplit:
        from slapo_pipeline.balance import balanced, container_violations

        if self.stages is None or self.after is not None:
            return self
        others = _other_cuts(node)
        if any(True for _ in container_violations(node, self.stages, others)):
            return self  # the preconditions say why
        return dataclasses.replace(self, after=balanced(node, self.stages, self.balance, others))

    def preconditions(self, node: Node) -> Iterator[Violation]:
        yield from unanswered_violations(node)
        if self.stages is not None:
            yield from self._list_violations(node, self.stages)
            return
        if self.after is not None or self.balance != "parameters":
            yield Violation("balance= and after= belong to stages=", "pipeline_split(stages=4, balance='flops')")
        yield from place_violations(node)
        if node.path in _other_cuts(node):
            yield Violation("the model is cut after this module already", "remove this second call")
        yield from above_violations(node)

    def _list_violations(self, node: Node, stages: int) -> Iterator[Violation]:
        from slapo_pipeline.balance import container_violations, find_blocks

        yield from container_violations(node, stages, _other_cuts(node))
        blocks, problem = find_blocks(node, stages)
        if problem is None and stages > 1:
            yield from above_violations(node[blocks[0]])
        if self.after is None or problem is not None:
            return
        if len(self.after) != stages - 1:
            yield Violation(
                f"{stages} stages have {stages - 1} cuts, and after= names {len(self.after)}: {', '.join(self.after)}",
                f"pipeline_split(stages={stages}) finds them",
            )
        missing = [path for path in self.after if path not in blocks[:-1]]
        if missing:
            yield Violation(
                f"after= names {missing[0]!r}, which is not one of the blocks {blocks[0]!r} to {blocks[-2:][0]!r}",
                f"pipeline_split(stages={stages}) finds them",
            )
        elif [blocks.index(path) for path in self.after] != sorted({blocks.index(path) for path in self.after}):
            yield Violation(f"after= must name blocks in their order (got {', '.join(self.after)})")

    def apply(self, node: Node, edit: Edit) -> None:
        if self.stages is None:
            edit.note("the model is cut after it when stages are made")
        elif not self.after:
            edit.note("one stage: nothing to cut")
        else:
            edit.note(f"when stages are made, the model is cut after {', '.join(self.after)}")

    def effects(self, node: Node) -> Iterator[Effect]:
        if node.mesh is not None and "pp" in node.mesh and node.mesh.size("pp") > 1:
            for path in self.cuts(node.path):  # the rank that runs it sends, if not here then from its other stages
                yield Collective("send", "pp", "step", at=path)


def cuts_of(records: Iterable[Record]) -> dict[str, Record]:
    """Return the paths of the modules after which steps cut, each with its step."""
    return {
        path: record
        for record in records
        if isinstance(record.primitive, PipelineSplit)
        for path in record.primitive.cuts(record.path)
    }


def _other_cuts(node: Node) -> tuple[str, ...]:
    return tuple(cuts_of(root_of(node).records_below()))
