"""Axes of parameters that can be split, and the steps that split them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slapo_models.auto.axes import LEAF, SUM, Axis, coverage
from slapo_models.auto.placement import Follow, Graph, LeftWhole, Placement
from slapo_models.auto.recording import PARAMETER, Value


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
    """An axis that is split, or two, one within the other.

    Args:
        leaves: e.g. the heads; or the KV heads, which are fewer than the ranks, and the query heads of each: a tensor
            with the first alone has each shard on several ranks.
        members: parameters and buffers with the axis.
        placement: its collectives.
        counts: sizes that attributes may hold: extents of full axes, and of the leaves; each with the option of
            ``shard_attribute`` where it counts one of two leaves alone, or ``""``.
    """

    leaves: tuple[Axis, ...]
    members: tuple[Value, ...]
    placement: Placement = field(default_factory=Placement)
    counts: tuple[tuple[int, str], ...] = ()

    @property
    def elements(self) -> float:
        """The number of elements that are split."""
        found = 0.0
        for member in self.members:
            share = max(_covered(axis, self.leaves) / axis.size for axis in member.axes if axis.size)
            found += share * math.prod(member.shape) if len(member.shape) > 1 else 0
        return found

    @property
    def what(self) -> str:
        """The axis in words."""
        return " x ".join(f"{leaf.size}" for leaf in self.leaves)


def members_by_leaf(graph: Graph) -> dict[Axis, list[Value]]:
    """Return leaf -> parameters and buffers with it, in the model's order."""
    found: dict[Axis, list[Value]] = {}
    for value in dict.fromkeys(graph.recording.values.values()):
        for leaf in dict.fromkeys(leaf for axis in value.axes for leaf in axis.leaves()):  # the same on every rank
            found.setdefault(leaf, []).append(value)
    return found


def divisors(leaves: Sequence[Axis], ranks: int) -> dict[Axis, int]:
    """Return what each leaf's size is divided by: of two, the first by its size, the second by the rest."""
    if len(leaves) == 1:
        return {leaves[0]: ranks}
    outer, inner = leaves
    return {outer: outer.size, inner: ranks // outer.size}


def all_divisors(split: Iterable[Sequence[Axis]], ranks: int) -> dict[Axis, int]:
    """Return what the leaves of several splits are divided by."""
    return {leaf: number for leaves in split for leaf, number in divisors(leaves, ranks).items()}


def pairs(axes: Iterable[Axis]) -> Iterator[tuple[Axis, Axis]]:
    """Yield the leaves within which other leaves lie: KV heads, and the query heads of each."""
    for axis in axes:
        axis = axis.found()
        if axis.kind == SUM:
            yield from pairs(axis.parts)
            continue
        factors = axis.factors()
        for outer, inner in itertools.pairwise(factors):
            segments = inner.parts if inner.kind == SUM else (inner,)
            for each in segments if outer.kind == LEAF else ():
                first = next(iter(each.factors()), None)
                if first is not None and first.kind == LEAF:
                    yield outer, first
        yield from pairs(factor for factor in factors if factor.kind == SUM)


def candidates(graph: Graph, ranks: int) -> Iterator[Candidate]:
    """Yield splits to try, the largest first."""
    members = members_by_leaf(graph)

    def can_split(leaves: Sequence[Axis]) -> bool:
        return all(not leaf.reasons and leaf.size % by == 0 for leaf, by in divisors(leaves, ranks).items())

    found = []
    for leaf, values in members.items():
        within = [pair for value in values for pair in pairs(value.axes) if pair[0] is leaf]
        for leaves in ((leaf,), *dict.fromkeys(within)):
            if len(leaves) == 2 and (leaf.size >= ranks or ranks % leaf.size):
                continue
            own = dict.fromkeys(value for each in leaves for value in members[each])
            if leaf.kind == LEAF and can_split(leaves) and any(each.origin == PARAMETER and each.uses for each in own):
                found.append(Candidate(leaves, tuple(own)))
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
        if 2 * _covered(own[0], candidate.leaves) < own[0].size:
            raise LeftWhole("only a part of a parameter's axis would be split")
        packing(own[0], candidate.leaves)
    if not any(len(member.shape) > 1 for member in candidate.members):
        raise LeftWhole("no matrix has the axis")
    candidate.placement = Follow(graph, candidate.leaves).run()
    if not candidate.placement.sums:
        raise LeftWhole("nothing sums over the axis")
    candidate.counts = tuple(dict.fromkeys(_extents(graph, candidate)))


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


def _extents(graph: Graph, candidate: Candidate) -> Iterator[tuple[int, str]]:
    split = frozenset(candidate.leaves)
    options = {
        frozenset((leaf,)): option for leaf, option in zip(candidate.leaves, ("shards", "holders_of"), strict=False)
    }
    options[split] = ""
    own = {leaf for member in candidate.members for leaf in graph.leaves(member)}
    for leaf in candidate.leaves:
        yield leaf.size, options[frozenset((leaf,))]
        for operator in graph.operators_of.get(leaf, ()):
            for value in (*operator.inputs, *operator.results):
                for axis in value.axes:
                    if leaf in axis.leaves() and own.issuperset(axis.leaves()):
                        found = coverage((axis,), split)
                        yield from ((axis.size, option) for each, option in options.items() if each in found)


def _covered(axis: Axis, leaves: Sequence[Axis]) -> int:
    """Return how many elements of an axis belong to one of some leaves."""
    axis = axis.found()
    if axis.kind == LEAF:
        return axis.size if axis in leaves else 0
    if axis.kind == SUM:
        return sum(_covered(part, leaves) for part in axis.parts)
    return axis.size - math.prod(part.size - _covered(part, leaves) for part in axis.factors())


def matrices(axis: Axis, leaves: Sequence[Axis]) -> list[tuple[int, frozenset[Axis]]]:
    """Return the matrices one after the other on an axis: their sizes, and the leaves that split each.

    Of groups with more than one matrix each (a KV head behind its queries) only the first is listed.

    Raises:
        LeftWhole: a rank would have more than one shard of a matrix.
    """
    axis = axis.found()
    own = frozenset(leaves).intersection(axis.leaves())
    if not own or axis.kind == LEAF:
        return [(axis.size, own)]
    if axis.kind == SUM:
        return [matrix for part in axis.parts for matrix in matrices(part, leaves)]
    factors = axis.factors()
    place = next(number for number, each in enumerate(factors) if not own.isdisjoint(each.leaves()))
    first, rest = factors[place], factors[place + 1 :]
    outer, inner = math.prod(each.size for each in factors[:place]), math.prod(each.size for each in rest)
    if own.issubset(first.leaves()):
        return [(size * inner, split) for size, split in matrices(first, leaves)] * outer
    if first is not leaves[0] or leaves[1] not in rest[0].leaves():
        raise LeftWhole("a rank would have more than one shard of a parameter")
    groups = [(size * inner // rest[0].size, split | {first}) for size, split in matrices(rest[0], leaves)]
    return [(first.size * size, split) for size, split in groups] * outer if len(groups) == 1 else groups


def packing(axis: Axis, leaves: Sequence[Axis]) -> tuple[tuple[str, Any], ...]:
    """Return ``packed`` and ``shards`` of ``shard`` for an axis.

    Raises:
        LeftWhole: there are none.
    """
    parts = matrices(axis, leaves)
    sizes = tuple(size for size, _ in parts)
    counts = tuple(None if len(own) == len(leaves) else leaves[0].size if own else 1 for _, own in parts)
    is_known = sum(sizes) in (axis.size, axis.size // leaves[0].size)
    if not is_known or any(own and leaves[0] not in own for _, own in parts):
        raise LeftWhole("a rank would have more than one shard of a parameter")
    if len(set(counts)) > 1:
        return (("packed", sizes), ("shards", counts))
    packed = () if len(sizes) == 1 else (("packed", len(sizes) if len(set(sizes)) == 1 else sizes),)
    return packed if counts[0] is None else (*packed, ("shards", counts[0]))


def local_shape(value: Value, by: Mapping[Axis, int]) -> tuple[int, ...]:
    """Return the shape of a rank's shard, where axes are divided by numbers of ranks."""
    return tuple(local_size(axis, by) for axis in value.axes)


def local_size(axis: Axis, by: Mapping[Axis, int]) -> int:
    """Return a rank's number of elements of an axis."""
    axis = axis.found()
    if axis.kind == LEAF:
        return axis.size // by.get(axis, 1)
    sizes = [local_size(part, by) for part in axis.parts]
    return sum(sizes) if axis.kind == SUM else math.prod(sizes)


def steps(candidate: Candidate) -> list[Step]:
    """Return the steps of a proved split, without attributes: first where it begins, then where its sums end it."""
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
        part = (
            f"{candidate.leaves[0].size} of its " if "shards" in dict(packed) and len(candidate.leaves) > 1 else "its "
        )
        reason = f"the ranks divide axis {axis} by {part}{candidate.what} heads or features"
        found.append(Step(path, "shard", (tuple(given) if isinstance(given, list) else given,), tuple(options), reason))
    placement = candidate.placement
    for path, named in placement.gradients.items():
        options = [] if named is None else [("inputs", named)]
        found.append(Step(path, "sync", ("bwd_post", "all_reduce"), tuple(options), "each rank's shards see a part of "
                          "the gradient of its input"))  # fmt: skip
    for path, positions in placement.sums.items():
        options = [("outputs", positions)] if positions else []
        found.append(Step(path, "sync", ("fwd_post", "all_reduce"), tuple(options), "its output is a partial sum"))
    ends = list(placement.sums)
    found.sort(key=lambda step: ends.index(step.path) if step.path in ends else -1)
    summed: dict[str, list[str]] = {}
    for path, name in placement.parameters:
        summed.setdefault(path, []).append(name)
    for path, names in summed.items():
        given = names[0] if len(names) == 1 else tuple(sorted(names, reverse=True))
        found.append(Step(path, "sync_gradient", (given,), (), "it is on every rank and sees a shard"))
    for path in placement.streams:
        found.append(Step(path, "fork_rng", (), (), "it uses the RNG on a shard"))
    return found
