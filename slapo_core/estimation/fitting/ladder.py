"""A chain of sets, each with a higher peak and less to compute again than the one before: what `fit` chooses from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Rung", "ladder"]

_FRONT = 600  # sets that the chain is looked for among


@dataclass(frozen=True)
class Rung:
    """One set.

    Args:
        units: their numbers.
        peak: bytes, by the model.
        cost: of computing them again.
        flops: likewise; filled in where units have their names again.
        seconds: likewise.
    """

    units: tuple[int, ...]
    peak: float
    cost: float
    flops: float = 0.0
    seconds: float = 0.0


def ladder(sets: torch.Tensor, peaks: torch.Tensor, cost: torch.Tensor, *, whole: float) -> list[Rung]:
    """The best chain in which peaks rise, costs fall, and the number of units never grows; it ends with no unit.

    The best one for every target taken for itself need not be monotone: with more memory two cheap units may stand for
    a dear one. So chains are compared by their worst target: how much longer the step takes there than with the best
    set for that target.

    Args:
        sets: ``(sets, units)`` booleans.
        peaks: of them.
        cost: of each unit.
        whole: cost of the step without checkpointing.
    """
    costs, counts = sets.to(torch.float64) @ cost, sets.sum(dim=1)
    free = peaks[counts == 0].min()
    inside = (peaks < free) | (counts == 0)
    sets, peaks, costs, counts = sets[inside], peaks[inside], costs[inside], counts[inside]
    best = _best_costs(peaks, costs)
    front = _front(peaks, costs, counts)
    nodes = [(peaks[i].item(), costs[i].item(), int(counts[i])) for i in front]
    chain = _chain(nodes, best, max(whole, 1.0))
    return [
        Rung(tuple(sets[front[node]].nonzero().flatten().tolist()), nodes[node][0], nodes[node][1]) for node in chain
    ]


def _best_costs(peaks: torch.Tensor, costs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Peaks in order, and the least cost of the sets up to each."""
    order = torch.argsort(peaks, stable=True)
    return peaks[order], torch.cummin(costs[order], dim=0).values


def _front(peaks: torch.Tensor, costs: torch.Tensor, counts: torch.Tensor) -> list[int]:
    """Sets that no other one of at most as many units beats in both; by peak."""
    kept: list[int] = []
    for count in range(int(counts.max()) + 1):
        of_count = (counts == count).nonzero().flatten()
        order = of_count[torch.argsort(costs[of_count], stable=True)]
        order = order[torch.argsort(peaks[order], stable=True)]
        least = torch.cummin(costs[order], dim=0).values
        better = torch.ones(len(order), dtype=torch.bool)
        better[1:] = costs[order][1:] < least[:-1]
        kept += order[better].tolist()
    if len(kept) > _FRONT:  # the ends stay: the least peak, and no unit
        kept.sort(key=lambda i: (peaks[i].item(), costs[i].item()))
        ends = {kept[0], *(i for i in kept if counts[i] == 0)}
        step = len(kept) / _FRONT
        kept = [one for n, one in enumerate(kept) if one in ends or int(n / step) != int((n - 1) / step)]
    return sorted(kept, key=lambda i: (peaks[i].item(), costs[i].item(), int(counts[i])))


def _chain(nodes: list[tuple[float, float, int]], best: tuple[torch.Tensor, torch.Tensor], whole: float) -> list[int]:
    """The chain from a least peak to the end whose worst loss is least, and then the sum of its losses."""
    sorted_peaks, least = best
    # The best set below each node's peak: what is lost until the chain gets there.
    below = torch.searchsorted(sorted_peaks, torch.tensor([peak for peak, _, _ in nodes], dtype=torch.float64))
    before = [least[place - 1].item() if place else float("inf") for place in below.tolist()]
    start = min(peak for peak, _, _ in nodes)
    worst: list[tuple[float, float]] = []
    previous: list[int] = []
    for number, (peak, cost, count) in enumerate(nodes):
        found, origin = (float("inf"), float("inf")), -1
        if peak == start:
            lost = (cost - least[0].item()) / (whole + cost)
            found = (lost, lost)
        for other in range(number):
            other_peak, other_cost, other_count = nodes[other]
            if other_peak < peak and other_cost > cost and other_count >= count:
                loss = (other_cost - before[number]) / (whole + before[number])
                candidate = (max(worst[other][0], loss), worst[other][1] + loss)
                if candidate < found:
                    found, origin = candidate, other
        worst.append(found)
        previous.append(origin)
    chain = [len(nodes) - 1]
    while previous[chain[-1]] >= 0:
        chain.append(previous[chain[-1]])
    return chain[::-1]
