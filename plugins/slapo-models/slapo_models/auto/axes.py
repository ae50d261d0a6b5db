"""Axes of tensors that are split together: unified where an operator pairs them, divided where a view cuts them.

An axis is a leaf, a product of axes (outermost first: features are heads by head size), or a concatenation (queries,
keys and values in one matrix). A leaf is what can be split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

LEAF, PRODUCT, SUM = "leaf", "product", "sum"


class Axis:
    """An axis, or a part of one.

    Args:
        size: number of elements.
        kind: a leaf, a product or a concatenation.
        parts: of a product, outermost first, or of a concatenation, in order.
    """

    __slots__ = ("_same", "kind", "parts", "reasons", "size")

    def __init__(self, size: int, kind: str = LEAF, parts: tuple[Axis, ...] = ()) -> None:
        self.size, self.kind, self.parts = size, kind, parts
        self.reasons: dict[str, None] = {}
        self._same: Axis | None = None

    def found(self) -> Axis:
        """Return the axis that stands for this one and all that were unified with it."""
        axis = self
        while axis._same is not None:
            if axis._same._same is not None:
                axis._same = axis._same._same
            axis = axis._same
        return axis

    def factors(self) -> list[Axis]:
        """Return the factors, outermost first: leaves and concatenations."""
        axis = self.found()
        if axis.kind != PRODUCT:
            return [axis] if axis.size != 1 else []
        return [factor for part in axis.parts for factor in part.factors()]

    def leaves(self) -> Iterator[Axis]:
        """Yield the leaves, of concatenations too."""
        axis = self.found()
        if axis.kind == LEAF:
            if axis.size != 1:
                yield axis
        else:
            for part in axis.parts:
                yield from part.leaves()

    def block(self, reason: str) -> None:
        """Refuse a split of every leaf.

        Args:
            reason: the operator that needs the full axis.
        """
        axis = self.found()
        if axis.size == 1 or reason in axis.reasons:
            return
        axis.reasons[reason] = None
        for part in axis.parts:
            part.block(reason)

    def __repr__(self) -> str:
        axis = self.found()
        if axis.kind == LEAF:
            return f"{axis.size}{'!' if axis.reasons else ''}#{id(axis) % 9973}"
        return f"({('*' if axis.kind == PRODUCT else '|').join(map(repr, axis.parts))})"

    def _become(self, kind: str, parts: Sequence[Axis]) -> None:
        self.kind, self.parts = kind, tuple(parts)
        for reason in self.reasons:
            for part in parts:
                part.block(reason)


def product(parts: Sequence[Axis]) -> Axis:
    """Return the axis whose elements are the combinations of the parts' elements."""
    factors = [factor for part in parts for factor in part.factors()]
    if len(factors) == 1:
        return factors[0]
    return Axis(math.prod(factor.size for factor in factors), PRODUCT if factors else LEAF, tuple(factors))


def concatenation(parts: Sequence[Axis]) -> Axis:
    """Return the axis that has the parts one after the other."""
    segments = [each for part in parts for each in _segments(part) if each.size]
    if len(segments) == 1:
        return segments[0]
    return Axis(sum(each.size for each in segments), SUM if segments else LEAF, tuple(segments))


def unify(a: Axis, b: Axis, where: str) -> None:
    """Make two axes one: what splits one splits the other.

    Args:
        a: an axis.
        b: another one, of equal size.
        where: the operator, a reason if their structures do not fit.
    """
    a, b = a.found(), b.found()
    if a is b:
        return
    if a.size != b.size:
        a.block(where)
        b.block(where)
        return
    if a.kind == b.kind == PRODUCT:
        _unify_factors(a.factors(), b.factors(), where)
    elif a.kind == b.kind == SUM:
        _unify_segments(a, b, where)
    elif LEAF not in (a.kind, b.kind):
        both = (a, b) if a.kind == SUM else (b, a)
        if not _sum_as_product(*both, where):
            a.block(where)
            b.block(where)
            return
    a, b = a.found(), b.found()
    if a is b:
        return
    if a.kind == LEAF:
        a, b = b, a
    for reason in b.reasons:
        a.block(reason)
    reasons = list(a.reasons)
    b._same = a
    for reason in reasons:
        for part in a.parts:
            part.block(reason)


def divided(axis: Axis, outer: int, where: str) -> tuple[Axis, Axis] | None:
    """Divide an axis into a product of an outer part of ``outer`` elements and an inner one; None if it cannot be."""
    axis = axis.found()
    if axis.size % outer or not axis.size:
        return None
    if outer in (1, axis.size):
        return (Axis(1), axis) if outer == 1 else (axis, Axis(1))
    inner = axis.size // outer
    if axis.kind == SUM:
        if any(part.size % inner for part in axis.parts):
            return None
        common, outers = Axis(inner), []
        for part in axis.parts:
            halves = divided(part, part.size // inner, where)
            if halves is None:
                return None
            outers.append(halves[0])
            unify(halves[1], common, where)
        axis._become(PRODUCT, (concatenation(outers), common))
        return axis.parts[0], axis.parts[1]
    if axis.kind == LEAF:
        axis._become(PRODUCT, (Axis(outer), Axis(inner)))
        return axis.parts[0], axis.parts[1]
    taken, factors = 1, axis.factors()
    for position, factor in enumerate(factors):
        if taken * factor.size <= outer:
            taken *= factor.size
            if taken == outer:
                return product(factors[: position + 1]), product(factors[position + 1 :])
            continue
        if outer % taken:
            return None
        halves = divided(factor, outer // taken, where)
        if halves is None:
            return None
        return product([*factors[:position], halves[0]]), product([halves[1], *factors[position + 1 :]])
    return None


def segment(axis: Axis, start: int, stop: int, where: str) -> Axis:
    """Return the elements from ``start`` to ``stop`` of an axis, which becomes a concatenation."""
    axis = axis.found()
    if start <= 0 and stop >= axis.size:
        return axis
    if stop <= start:
        return Axis(0)
    if axis.kind == PRODUCT:
        factors = axis.factors()
        inner = axis.size // factors[0].size
        if start % inner or stop % inner:
            axis.block(where)
            return _blocked(stop - start, where)
        return product([segment(factors[0], start // inner, stop // inner, where), *factors[1:]])
    for cut in (start, stop):
        if not _cut(axis, cut, where):
            axis.block(where)
            return _blocked(stop - start, where)
    found, position = [], 0
    for part in _segments(axis):
        if start <= position < stop:
            found.append(part)
        position += part.size
    return concatenation(found)


def viewed(axes: Sequence[Axis], shape: Sequence[int], where: str) -> list[Axis]:
    """Return the axes of a view of the same elements with another shape."""
    factors = [factor for axis in axes for factor in axis.factors()]
    found: list[Axis] = []
    for size in shape:
        taken: list[Axis] = []
        missing = size
        while missing > 1 and factors:
            factor = factors[0]
            if missing % factor.size == 0:
                taken.append(factors.pop(0))
                missing //= factor.size
                continue
            halves = divided(factor, missing, where) if factor.size % missing == 0 else None
            if halves is None:
                break
            factors[:1] = halves[1].factors()
            taken += halves[0].factors()
            missing = 1
        if missing > 1:  # the cut is within an axis
            for factor in (*factors, *taken, *(leaf for axis in found for leaf in axis.leaves())):
                factor.block(where)
            return [*found, *(_blocked(size, where) for size in shape[len(found) :])]
        found.append(product(taken) if size != 1 else Axis(1))
    return found


def coverage(axes: Iterable[Axis], leaves: frozenset[Axis]) -> frozenset[frozenset[Axis]]:
    """Return which of some leaves the elements of a tensor belong to.

    Args:
        axes: of the tensor.
        leaves: to look for.

    Returns:
        one set for each kind of element, e.g. two for queries beside keys.
    """
    found = {frozenset[Axis]()}
    for axis in axes:
        axis = axis.found()
        if axis.kind == SUM:
            own = frozenset().union(*(coverage((part,), leaves) for part in axis.parts))
        else:
            own = coverage(axis.parts, leaves) if axis.kind == PRODUCT else frozenset((leaves & {axis},))
        found = {one | other for one in found for other in own}
    return frozenset(found)


def _blocked(size: int, where: str) -> Axis:
    axis = Axis(size)
    axis.block(where)
    return axis


def _segments(axis: Axis) -> list[Axis]:
    axis = axis.found()
    if axis.kind != SUM:
        return [axis]
    return [each for part in axis.parts for each in _segments(part)]


def _cut(axis: Axis, at: int, where: str) -> bool:
    """Make an element the start of a segment of a leaf or a concatenation."""
    axis = axis.found()
    position = 0
    for part in _segments(axis):
        if at <= position:
            return True
        if at < position + part.size:
            within = at - position
            if part.kind == LEAF:
                part._become(SUM, (Axis(within), Axis(part.size - within)))
                return True
            factors = part.factors()
            inner = part.size // factors[0].size
            return within % inner == 0 and _cut(factors[0], within // inner, where) and _distribute(part)
        position += part.size
    return True


def _distribute(axis: Axis) -> bool:
    """Turn a product whose outermost factor is a concatenation into a concatenation of products."""
    factors = axis.factors()
    if factors[0].kind != SUM:
        return False
    axis._become(SUM, [product([each, *factors[1:]]) for each in _segments(factors[0])])
    return True


def _unify_factors(a: list[Axis], b: list[Axis], where: str) -> None:
    while a and b:
        x, y = a[0].found(), b[0].found()
        if x.kind == PRODUCT or y.kind == PRODUCT:  # divided meanwhile
            a[:1], b[:1] = x.factors(), y.factors()
            continue
        if x.size == y.size:
            unify(x, y, where)
            del a[0], b[0]
            continue
        if x.size > y.size:
            a, b, x, y = b, a, y, x
        halves = divided(y, x.size, where)
        if halves is None:
            for factor in (*a, *b):
                factor.block(where)
            return
        b[:1] = [*halves[0].factors(), *halves[1].factors()]


def _unify_segments(a: Axis, b: Axis, where: str) -> None:
    position, ends = 0, set()
    for axis in (a, b):
        position = 0
        for part in _segments(axis):
            position += part.size
            ends.add(position)
    if not all(_cut(axis, end, where) for axis in (a, b) for end in ends):
        a.block(where)
        b.block(where)
        return
    for x, y in zip(_segments(a), _segments(b), strict=True):
        unify(x, y, where)


def _sum_as_product(full: Axis, factored: Axis, where: str) -> bool:
    """Unify a concatenation with a product: by its segments, or by its inner part."""
    factors = factored.factors()
    inner = factored.size // factors[0].size
    segments = _segments(full)
    if all(each.size % inner == 0 for each in segments):
        position = 0
        for each in segments:
            position += each.size
            if not _cut(factors[0].found(), position // inner, where) and position != full.size:
                return False
        position = 0
        for each in segments:
            start, position = position // inner, position + each.size
            unify(each, product([segment(factors[0], start, position // inner, where), *factors[1:]]), where)
        return True
    halves = divided(full, factors[0].size, where)
    if halves is None:
        return False
    unify(halves[0], factors[0], where)
    unify(halves[1], product(factors[1:]), where)
    return True
