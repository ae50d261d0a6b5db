"""Preconditions only look."""

from __future__ import annotations

import torch

from slapo_core.errors import PreconditionError
from slapo_core.spec.node import Node
from slapo_core.spec.primitive import Primitive, Violation
from slapo_core.testing.bench import Bench, prepare
from slapo_core.testing.case import Case
from slapo_core.testing.check import CheckError
from slapo_core.testing.snapshot import ModelSnapshot, listed

__all__ = ["preconditions_mutate_nothing"]


def preconditions_mutate_nothing(case: Case) -> None:
    """Asking for the preconditions, accepted or not, changes nothing and gives the same answer twice."""
    bench = prepare(case, mesh_size=2)
    _ask(bench, case.path, bench.primitive)
    for path, primitive in case.rejected():
        _ask(bench, path, primitive)


def _ask(bench: Bench, path: str, primitive: Primitive) -> None:
    node = bench.node_at(path)
    before, random = ModelSnapshot(bench.model), torch.get_rng_state()
    try:
        primitive = bench.settled(path, primitive)
    except PreconditionError as error:
        first = second = list(error.violations)
    else:
        first = _violations(primitive, node)
        second = _violations(primitive, node)
    if first != second:
        raise CheckError(
            f"the preconditions of {primitive} answer differently the second time",
            required=f"the same as the first time: {_shown(first)}",
            got=_shown(second),
            hint="compute the violations from the node and the fields alone; keep no state between calls",
        )
    lines = before.differences(bench.model)
    if not torch.equal(random, torch.get_rng_state()):
        lines.append("torch's random state: advanced")
    if lines:
        raise CheckError(
            f"the preconditions of {primitive} change the model",
            required="preconditions only look",
            got=listed(lines),
            hint="move every change into apply(), and make it through `edit`",
        )


def _violations(primitive: Primitive, node: Node) -> list[Violation]:
    return list(primitive.preconditions(node) or ())


def _shown(violations: list[Violation]) -> str:
    return "; ".join(map(str, violations)) or "no violation"
