"""The edge of what fits into memory."""

from __future__ import annotations

from slapo_core.spec.sampler import Point
from slapo_tune.samplers.moves import candidates_of
from slapo_tune.samplers.replaying import Asking

__all__ = ["Edge"]


class Edge:
    """Points that cannot have more memory along one symbol.

    The symbol is the last one of a point along which the predicted memory rises or falls all the way: candidates that
    are made from earlier choices, such as the checkpoint ratios of a batch size, are chosen after them.

    Args:
        ask: of the search.
    """

    def __init__(self, ask: Asking) -> None:
        self._ask = ask

    def lifted(self, point: Point) -> Point:
        """The point that fits with the most memory, among those that differ in that symbol alone."""
        space = self._ask.space
        for symbol in reversed(point):
            candidates = candidates_of(space, point)[symbol]
            line = [self._with(point, symbol, value) for value in candidates]
            points = [other for other in line if other is not None]
            needs = [space.predicted_memory(other) for other in points]
            known = [need for need in needs if need is not None]
            if len(known) < max(3, len(points)) or not _is_monotone(known):
                continue
            fitting = [other for other in points if self._ask.fits(other)]
            if fitting:
                return max(fitting, key=lambda other: space.predicted_memory(other) or 0)
        return point

    def _with(self, point: Point, symbol: str, value: object) -> Point | None:
        wanted = {**point, symbol: value}
        is_there = True

        def pick(name: str, candidates: tuple[object, ...]) -> int:
            nonlocal is_there
            if name not in wanted or wanted[name] not in candidates:
                is_there = False
                return 0
            return candidates.index(wanted[name])

        found = self._ask.space.draw(pick)
        return found if is_there and found == wanted else None


def _is_monotone(needs: list[int]) -> bool:
    return needs in (sorted(needs), sorted(needs, reverse=True)) and needs[0] != needs[-1]
