"""Sets of units that are worth a look: all that can be best, where that is known, else a spread of good ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

__all__ = ["candidate_sets"]

LIMIT = 1 << 16  # sets


def candidate_sets(alike: Sequence[Hashable], cost: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """Sets to choose from.

    Of units that are alike the first ones are checkpointed: what a unit frees is free from its forward pass to its
    backward pass, and an earlier one has the longer time. So a number for each class of units says all. Where the
    numbers have too many combinations, those go on from class to class that free most for what they cost.

    Args:
        alike: for each unit, in the order in which they run, what is equal for those that are alike.
        cost: of computing each unit again.
        saved: bytes that it frees; units that free none are left out.

    Returns:
        ``(sets, units)`` booleans; the empty set is among them.
    """
    classes: dict[Hashable, list[int]] = {}
    for unit, kind in enumerate(alike):
        if saved[unit] > 0:
            classes.setdefault(kind, []).append(unit)
    sets = torch.zeros(1, len(alike), dtype=torch.bool)
    for units in classes.values():
        longer = sets.repeat(len(units) + 1, 1)
        for number in range(1, len(units) + 1):
            longer[number * len(sets) : (number + 1) * len(sets), units[:number]] = True
        sets = longer
        if len(sets) > LIMIT // 8:
            sets = _thinned(sets, cost, saved, LIMIT // 16)
    return sets


def _thinned(sets: torch.Tensor, cost: torch.Tensor, saved: torch.Tensor, limit: int) -> torch.Tensor:
    """Those that free more than all that cost less; evenly over their number, if they are still too many."""
    costs, freed = sets.to(torch.float64) @ cost, sets.to(torch.float64) @ saved
    order = torch.argsort(-freed, stable=True)
    order = order[torch.argsort(costs[order], stable=True)]
    most = torch.cummax(freed[order], dim=0).values
    better = torch.ones(len(order), dtype=torch.bool)
    better[1:] = freed[order][1:] > most[:-1]
    kept = order[better]
    if len(kept) > limit:
        kept = kept[torch.linspace(0, len(kept) - 1, limit).round().long()]
    return sets[kept]
