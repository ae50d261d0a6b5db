"""When each rank does what: a schedule with every wait for what others have not finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slapo_pipeline.drawing.orders import Work

__all__ = ["Box", "Timeline", "simulate"]


@dataclass(frozen=True)
class Box:
    """Work at its time.

    Args:
        rank: that does it.
        work: what.
        start: in units of time.
        end: likewise.
    """

    rank: int
    work: Work
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step of all ranks.

    Args:
        boxes: sorted by rank and time.
        ranks: how many.
    """

    boxes: tuple[Box, ...]
    ranks: int

    @property
    def length(self) -> float:
        """From the first start to the last end."""
        return max(box.end for box in self.boxes)

    @property
    def bubble(self) -> float:
        """The part of the ranks' time in which they wait, from 0 to 1."""
        busy = sum(box.end - box.start for box in self.boxes)
        return 1 - busy / (self.length * self.ranks)


def simulate(orders: Sequence[Sequence[Work]], *, forward: float = 1.0, backward: float = 2.0) -> Timeline:
    """Let every rank do its work in its order, each piece as soon as the rank and what the piece needs are ready.

    Messages take no time; a backward in two takes half of its time for the inputs and half for the weights.

    Args:
        orders: what each rank does.
        forward: time of a forward of one stage.
        backward: time of its backward.

    Raises:
        ValueError: the ranks wait for each other.
    """
    times = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    last = max(work.stage for order in orders for work in order)
    done: dict[Work, float] = {}
    free = [0.0] * len(orders)
    position = [0] * len(orders)
    boxes: list[Box] = []
    while any(position[rank] < len(order) for rank, order in enumerate(orders)):
        before = len(boxes)
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                work = order[position[rank]]
                ready = [_done(done, needed) for needed in _needs(work, last)]
                if any(time is None for time in ready):
                    break
                start = max(free[rank], *(time for time in ready if time is not None), 0.0)
                done[work] = free[rank] = start + times[work.kind]
                boxes.append(Box(rank, work, start, free[rank]))
                position[rank] += 1
        if len(boxes) == before:
            waiting = next(order[place] for order, place in zip(orders, position, strict=True) if place < len(order))
            raise ValueError(f"every rank waits for another one, the first of them to do {waiting}")
    return Timeline(tuple(sorted(boxes, key=lambda box: (box.rank, box.start))), len(orders))


def _needs(work: Work, last: int) -> Iterator[Work]:
    """What must be done before: of a backward, either form of the next stage's."""
    if work.kind == "F":
        if work.stage:
            yield Work("F", work.stage - 1, work.microbatch)
    elif work.kind == "W":
        yield Work("I", work.stage, work.microbatch)
    else:
        yield Work("F", work.stage, work.microbatch)
        if work.stage < last:
            yield Work("B", work.stage + 1, work.microbatch)


def _done(done: dict[Work, float], work: Work) -> float | None:
    if work.kind == "B":
        in_two = Work("I", work.stage, work.microbatch)
        return done.get(work, done.get(in_two))
    return done.get(work)
