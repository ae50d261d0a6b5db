"""The chain of sets that `fit` chooses from, of what was seen of every kind of rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from slapo_core.estimation.fitting.candidates import candidate_sets
from slapo_core.estimation.fitting.ladder import Rung, ladder
from slapo_core.estimation.fitting.peaks import PeakModel
from slapo_core.estimation.fitting.units import Structure
from slapo_core.estimation.fitting.watching import Profile

__all__ = ["chain_of"]

_NOISE = 1e-6
_SAME = 0.02  # units of one structure that free amounts this near to each other are alike


def chain_of(
    structures: Sequence[Structure], none: Sequence[Profile], all_: Sequence[Profile], *, by_time: bool
) -> list[Rung]:
    """The chain, the least peak first, no unit last.

    Args:
        structures: of the units.
        none: of each kind of rank, with no unit checkpointed.
        all_: with all of them.
        by_time: whether seconds are the cost, and not floating-point operations.
    """
    chains: list[list[Rung]] = []
    floor = 0.0
    for kinds, units in _together(none):
        own = [_only(none[kind], units) for kind in kinds]
        model = PeakModel(own, [_only(all_[kind], units) for kind in kinds])
        if not units:
            floor = max(floor, *(part.most for profile in own for part in profile.parts))
            continue
        cost = _seconds(model.seconds) if by_time else model.flops
        alike = _alike([structures[unit] for unit in units], cost.tolist(), model.saved)
        sets = candidate_sets(alike, cost, model.saved.amin(dim=0))
        whole = sum(part.seconds if by_time else part.flops for profile in own for part in profile.parts)
        rungs = ladder(sets, model.peaks(sets), cost, whole=whole)
        chains.append([_named(rung, units, model) for rung in rungs])
    return _merged(chains, floor)


def _seconds(seconds: torch.Tensor) -> torch.Tensor:
    """Without the last digits, in which sums of the same differ."""
    unit = seconds.abs().amax() * _NOISE
    return (seconds / unit).round() * unit if unit > 0 else seconds


def _together(profiles: Sequence[Profile]) -> list[tuple[list[int], list[int]]]:
    """Kinds of ranks that call units in common, with those units."""
    found: list[tuple[set[int], set[int]]] = []
    for kind, profile in enumerate(profiles):
        kinds, units = {kind}, {unit for unit, calls in enumerate(profile.calls) if calls}
        for other in [one for one in found if one[1] & units]:
            found.remove(other)
            kinds, units = kinds | other[0], units | other[1]
        found.append((kinds, units))
    return [(sorted(kinds), sorted(units)) for kinds, units in found]


def _only(profile: Profile, units: Sequence[int]) -> Profile:
    """Of these units only; no other one is called there."""
    place = {unit: number for number, unit in enumerate(units)}
    parts = tuple(
        replace(
            part,
            label=(part.label[0], place.get(part.label[1], -1), part.label[2]),
            live=tuple(part.live[unit] for unit in units),
            active=place.get(part.active, -1),
        )
        for part in profile.parts
    )
    return Profile(parts, tuple(profile.kept[u] for u in units), tuple(profile.calls[u] for u in units))


def _alike(structures: Sequence[Structure], costs: Sequence[float], saved: torch.Tensor) -> list[int]:
    """A number for each unit, equal for those that are alike."""
    firsts: list[int] = []
    found: list[int] = []
    for unit in range(len(structures)):
        for first in firsts:
            near = (saved[:, unit] - saved[:, first]).abs() <= _SAME * saved[:, first].abs()
            if structures[unit] == structures[first] and costs[unit] == costs[first] and bool(near.all()):
                found.append(first)
                break
        else:
            firsts.append(unit)
            found.append(unit)
    return found


def _named(rung: Rung, units: Sequence[int], model: PeakModel) -> Rung:
    chosen = list(rung.units)
    return replace(
        rung,
        units=tuple(units[number] for number in chosen),
        flops=model.flops[chosen].sum().item(),
        seconds=model.seconds[chosen].sum().item(),
    )


def _merged(chains: Sequence[Sequence[Rung]], floor: float) -> list[Rung]:
    """One chain of several that have no unit in common: for each target the rung of each."""
    least = max([floor, *(chain[0].peak for chain in chains)])
    targets = sorted({least, *(rung.peak for chain in chains for rung in chain if rung.peak > least)})
    merged: list[Rung] = []
    for target in targets:
        rungs = [[rung for rung in chain if rung.peak <= target][-1] for chain in chains]
        merged.append(
            Rung(
                tuple(sorted(unit for rung in rungs for unit in rung.units)),
                max([floor, *(rung.peak for rung in rungs)]),
                sum(rung.cost for rung in rungs),
                sum(rung.flops for rung in rungs),
                sum(rung.seconds for rung in rungs),
            )
        )
    return merged
