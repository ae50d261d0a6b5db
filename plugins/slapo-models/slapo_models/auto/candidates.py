"""Axes of parameters that can be split, and the steps that split them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from slapo_models.auto.axes import LEAF, SUM, Axis
from slapo_models.auto.placement import Follow, Graph, LeftWhole, Placement
from slapo_models.auto.recording import BUFFER, PARAMETER, Value


@dataclass(frozen=True)
class Step:
    """A step to apply.

    Args:
        path: of the module.
        name: of the primitive.
        arguments: by position.
        options: by name.
        reason: why.
    """

    path: str
    name: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    reason: str = ""


@dataclass(eq=False)
class Candidate:
    """Leaves that are split together.

    Args:
        leaves: axes of equal meaning, e.g. the heads of one layer.
        members: parameters and buffers with the axis.
        placement: its collectives.
        counts: sizes that attributes may hold: extents of full axes with the leaves, and of the leaves.
    """

    leaves: tuple[Axis, ...]
    members: tuple[Value, ...]
    placement: Placement = field(default_factory=Placement)
    counts: tuple[int, ...] = ()

    @property
    def elements(self) -> float:
        """The number of elements that are split."""
        found = 0.0
        for member in self.members:
            axis = next(axis for axis in member.axes if not set(self.leaves).isdisjoint(axis.leaves()))
            share = sum(size for size, is_split in matrices(axis, self.leaves) if is_split) / axis.size
            found += share * math.prod(member.shape) if len(member.shape) > 1 else 0
        return found

    @property
    def what(self) -> str:
        """The axis in words."""
        return " and ".join(f"{leaf.size}" for leaf in self.leaves)


def members_by_leaf(graph: Graph) -> dict[Axis, list[Value]]:
    """Return leaf -> parameters and buffers with it, in the model's order."""
    found: dict[Axis, list[Value]] = {}
    for value in dict.fromkeys(graph.recording.values.values()):
        for leaf in dict.fromkeys(leaf for axis in value.axes for leaf in axis.leaves()):  # the same on every rank
            found.setdefault(leaf, []).append(value)
    return found


def candidates(graph: Graph, ranks: int) -> Iterator[Candidate]:
    """Yield splits to try, the largest first."""
    members = members_by_leaf(graph)
    found = []
    for leaf, values in members.items():
        is_used = any(value.origin == PARAMETER and value.uses for value in values)
        if leaf.kind == LEAF and not leaf.reasons and leaf.size % ranks == 0 and is_used:
            found.append(Candidate((leaf,), tuple(values)))
    yield from sorted(found, key=lambda each: -each.elements)


def prove(graph: Graph, candidate: Candidate) -> None:
    """Follow a split through the recording, and set its collectives.

    Raises:
        LeftWhole: it cannot be proved right.
    """
    for member in candidate.members:
        own = [axis for axis in member.axes if not set(candidate.leaves).isdisjoint(axis.leaves())]
        if len(own) > 1:
            raise LeftWhole("two axes of one parameter would be split")
        parts = matrices(own[0], candidate.leaves)
        if 2 * sum(size for size, is_split in parts if is_split) < sum(size for size, _ in parts):
            raise LeftWhole("only a part of a parameter's axis would be split")
    if not any(len(member.shape) > 1 for member in candidate.members):
        raise LeftWhole("no matrix has the axis")
    candidate.placement = Follow(graph, candidate.leaves).run()
    if not candidate.placement.sums:
        raise LeftWhole("nothing sums over the axis")
    candidate.counts = tuple(sorted(_extents(graph, candidate)))


class Together:
    """Check that proved splits are right together: none's partial gradients enter another's shards or sums.

    Args:
        graph: of the model.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._leaves: set[Axis] = set()
        self._partial: set[Value] = set()
        self._passed_on: set[Value] = set()

    def leaves_partial(self, value: Value) -> bool:
        """Return whether the gradient of what a parameter makes is partial."""
        return any(result in self._passed_on for use in value.uses for result in use.results)

    def add(self, candidate: Candidate) -> None:
        """Add a split.

        Raises:
            LeftWhole: it is not right with the earlier ones.
        """
        own = candidate.placement
        if (
            not own.passed_on.isdisjoint(self._partial)
            or not self._passed_on.isdisjoint(own.partial)
            or any(not self._leaves.isdisjoint(self._graph.leaves(value)) for value in own.passed_on)
            or any(not self._graph.leaves(value).isdisjoint(candidate.leaves) for value in self._passed_on)
        ):
            raise LeftWhole("the gradient of a sum over the ranks would be partial, of another split")
        self._leaves.update(candidate.leaves)
        self._partial |= own.partial
        self._passed_on |= own.passed_on


def _extents(graph: Graph, candidate: Candidate) -> set[int]:
    found = {leaf.size for leaf in candidate.leaves}
    own = {leaf for member in candidate.members for leaf in graph.leaves(member)}
    for leaf in candidate.leaves:
        for operator in graph.operators_of.get(leaf, ()):
            for value in (*operator.inputs, *operator.results):
                found |= {axis.size for axis in value.axes if leaf in axis.leaves() and own.issuperset(axis.leaves())}
    return found


def matrices(axis: Axis, leaves: Iterable[Axis]) -> list[tuple[int, bool]]:
    """Return the sizes of the matrices one after the other on an axis, and which of them are split on their rows."""
    axis, leaves = axis.found(), tuple(leaves)
    if not any(leaf in leaves for leaf in axis.leaves()):
        return [(axis.size, False)]
    if axis.kind == LEAF:
        return [(axis.size, True)]
    if axis.kind == SUM:
        return [matrix for part in axis.parts for matrix in matrices(part, leaves)]
    outer, *rest = axis.factors()
    inner = math.prod(factor.size for factor in rest)
    if any(leaf in leaves for leaf in outer.leaves()):
        return [(size * inner, is_split) for size, is_split in matrices(outer, leaves)]
    below: list[tuple[int, bool]] = []
    for position, factor in enumerate(rest):
        if any(leaf in leaves for leaf in factor.leaves()):
            outer_size = outer.size * math.prod(each.size for each in rest[:position])
            inner_size = math.prod(each.size for each in rest[position + 1 :])
            below = [(size * inner_size, is_split) for size, is_split in matrices(factor, leaves)] * outer_size
            break
    return below


def packing(axis: Axis, leaves: Iterable[Axis]) -> tuple[tuple[str, Any], ...]:
    """Return ``packed`` and ``shards`` of ``shard`` for an axis."""
    parts = matrices(axis, leaves)
    sizes = [size for size, _ in parts]
    if all(is_split for _, is_split in parts):
        packed = len(sizes) if len(set(sizes)) == 1 else tuple(sizes)
        return () if packed == 1 else (("packed", packed),)
    return (("packed", tuple(sizes)), ("shards", tuple(None if is_split else 1 for _, is_split in parts)))


def local_shape(value: Value, leaves: Iterable[Axis], ranks: int) -> tuple[int, ...]:
    """Return the shape of a rank's shard."""
    leaves = tuple(leaves)
    return tuple(_local(axis, leaves, ranks) for axis in value.axes)


def _local(axis: Axis, leaves: tuple[Axis, ...], ranks: int) -> int:
    axis = axis.found()
    if axis.kind == LEAF:
        return axis.size // ranks if axis in leaves else axis.size
    sizes = [_local(part, leaves, ranks) for part in axis.parts]
    return sum(sizes) if axis.kind == SUM else math.prod(sizes)


def steps(candidate: Candidate) -> list[Step]:
    """Return the steps of a proved split, without attributes."""
    found: list[Step] = []
    by_call: dict[tuple[str, tuple[tuple[str, Any], ...], int], list[str]] = {}
    for member in candidate.members:
        path, name = member.names[0]
        axis = next(
            position for position, each in enumerate(member.axes) if not set(candidate.leaves).isdisjoint(each.leaves())
        )
        packed = packing(member.axes[axis], candidate.leaves)
        if name == "bias" and (path, packed, 0) not in by_call:
            weight = next((key for key in by_call if key[:2] == (path, packed) and "weight" in by_call[key]), None)
            axis = weight[2] if weight is not None else axis
        by_call.setdefault((path, packed, axis), []).append(name)
    for (path, packed, axis), names in by_call.items():
        given: Any = names[0] if len(names) == 1 else names
        options: list[tuple[str, Any]] = [("axis", axis), *packed]
        found.append(Step(path, "shard", (tuple(given) if isinstance(given, list) else given,), tuple(options),
                          f"its axis {axis} has the {candidate.what} features that the ranks share"))  # fmt: skip
    placement = candidate.placement
    for path, named in placement.gradients.items():
        options = [] if named is None else [("inputs", named)]
        found.append(Step(path, "sync", ("bwd_post", "all_reduce"), tuple(options), "each rank's shards see a part of "
                          "the gradient of its input"))  # fmt: skip
    for path, positions in placement.sums.items():
        options = [("outputs", positions)] if positions else []
        found.append(Step(path, "sync", ("fwd_post", "all_reduce"), tuple(options), "its output is a partial sum"))
    summed: dict[str, list[str]] = {}
    for path, name in placement.parameters:
        summed.setdefault(path, []).append(name)
    for path, names in summed.items():
        given = names[0] if len(names) == 1 else tuple(sorted(names, reverse=True))
        found.append(Step(path, "sync_gradient", (given,), (), "it is on every rank and sees a shard"))
    for path in placement.streams:
        found.append(Step(path, "fork_rng", (), (), "it uses the RNG on a shard"))
    return found


__all__ = ["BUFFER", "Candidate", "Step", "candidates", "local_shape", "matrices", "packing", "prove", "steps"]
