"""What `fit` chooses from, on steps made up of numbers: against every subset of twelve units."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch

from slapo_core.estimation.fitting.chain import chain_of
from slapo_core.estimation.fitting.ladder import Rung
from slapo_core.estimation.fitting.peaks import PeakModel
from slapo_core.estimation.fitting.watching import Part, Profile


@dataclass(frozen=True)
class Unit:
    kind: int
    given: int  # bytes that its input takes
    saved: int  # bytes that it keeps beside its input, unless it is checkpointed
    busy: int  # bytes that it needs while it runs, in either pass
    flops: int


def step(units: list[Unit], chosen: set[int], *, head: int, in_flight: int = 1) -> Profile:
    """A training step: so many micro-batches go forward before the first comes back, as in a pipeline's first stage."""
    held, live, parts = 1000, [0] * len(units), []
    times: dict[tuple[str, int], int] = {}

    def part(what: str, number: int, most: int, flops: int) -> None:
        time = times[what, number] = times.get((what, number), -1) + 1
        parts.append(Part((what, number, time), most, flops, 0.0, tuple(live), number))

    for _ in range(in_flight):
        for number, unit in enumerate(units):
            part("forward", number, held + unit.given + unit.busy + unit.saved // 2 * (number in chosen), unit.flops)
            held += unit.given + unit.saved * (number not in chosen)
            live[number] += 1
    parts.append(Part(("after", 0, 0), held + head, 0, 0.0, tuple(live), -1))
    for _ in range(in_flight):
        for number, unit in reversed(list(enumerate(units))):
            live[number] -= 1
            again = number in chosen
            held += unit.saved * again
            part("backward", number, held + unit.busy + unit.saved // 3 * again, (2 + again) * unit.flops)
            held -= unit.given + unit.saved
    kept = tuple(float(unit.given + unit.saved * (number not in chosen)) for number, unit in enumerate(units))
    return Profile(tuple(parts), kept, (in_flight,) * len(units))


def peak(profile: Profile) -> int:
    return max(part.most for part in profile.parts)


def units_of(seed: int, classes: int) -> list[Unit]:
    draw = random.Random(seed)
    kinds = [
        Unit(kind, draw.randint(1, 30), draw.randint(20, 300), draw.randint(0, 200), draw.randint(50, 500))
        for kind in range(classes)
    ]
    return [kinds[draw.randrange(classes)] for _ in range(12)]


def below(chain: list[Rung], target: float) -> Rung:
    return [rung for rung in chain if rung.peak <= target][-1]


@pytest.mark.parametrize(("seed", "classes", "in_flight"), [(0, 1, 1), (1, 2, 1), (2, 4, 1), (3, 12, 1), (4, 3, 4)])
def test_fifty_targets_against_every_subset(seed: int, classes: int, in_flight: int) -> None:
    units = units_of(seed, classes)
    everything = set(range(len(units)))

    def played(chosen: set[int]) -> Profile:
        return step(units, chosen, head=100, in_flight=in_flight)

    none, all_ = played(set()), played(everything)
    chain = chain_of([(unit.kind,) for unit in units], [none], [all_], by_time=False)
    whole = sum(part.flops for part in none.parts)
    sets = torch.tensor(list(itertools.product([False, True], repeat=len(units))))
    true_peaks = PeakModel([none], [all_]).peaks(sets)
    for number in range(0, len(sets), 97):  # the model is exact for such steps
        chosen = set(sets[number].nonzero().flatten().tolist())
        assert peak(played(chosen)) == true_peaks[number]
    costs = in_flight * sets.to(torch.float64) @ torch.tensor([unit.flops for unit in units], dtype=torch.float64)
    least, most = true_peaks.min().item(), true_peaks[0].item()
    assert chain[0].peak == least
    assert chain[-1].units == ()
    before: Rung | None = None
    for target in torch.linspace(least, most, 50).tolist():
        rung = below(chain, target)
        assert peak(played(set(rung.units))) == rung.peak <= target
        assert rung.flops == in_flight * sum(units[number].flops for number in rung.units)
        best = costs[true_peaks <= target].min().item()
        assert whole + rung.flops <= 1.05 * (whole + best)
        assert before is None or (len(rung.units) <= len(before.units) and rung.flops <= before.flops)
        before = rung


def test_stages_of_a_pipeline_are_chosen_for_each_by_itself() -> None:
    first, second = [Unit(0, 1, 100, 0, 10)] * 3, [Unit(0, 1, 40, 0, 10)] * 3

    def profile(chosen: set[int], units: list[Unit], offset: int) -> Profile:
        own = step(units, {number - offset for number in chosen}, head=0)
        parts = tuple(
            Part(
                (part.label[0], part.label[1] + offset, part.label[2]),
                part.most,
                part.flops,
                0.0,
                (0,) * offset + part.live + (0,) * (3 - offset),
                part.active + offset if part.active >= 0 else -1,
            )
            for part in own.parts
        )
        zeros = ((0.0,) * offset, (0.0,) * (3 - offset))
        return Profile(parts, zeros[0] + own.kept + zeros[1], (0,) * offset + (1,) * 3 + (0,) * (3 - offset))

    def played(chosen: set[int]) -> list[Profile]:
        return [profile(chosen & {0, 1, 2}, first, 0), profile(chosen & {3, 4, 5}, second, 3)]

    chain = chain_of([(0,)] * 6, played(set()), played({0, 1, 2, 3, 4, 5}), by_time=False)
    for rung in chain:
        assert max(map(peak, played(set(rung.units)))) == rung.peak
    assert all(rung.units in ((), (0,), (0, 1), (0, 1, 2)) for rung in chain if rung.peak > 1123)
    assert chain[-1].units == ()


def test_units_that_take_the_same_time_are_alike_whatever_the_last_digit() -> None:
    units = [Unit(0, 10, 100, 0, 100)] * 4

    def timed(chosen: set[int]) -> Profile:
        played = step(units, chosen, head=0)
        spent = [1e-3 * part.flops + 1e-13 * number for number, part in enumerate(played.parts)]
        parts = tuple(replace(part, seconds=seconds) for part, seconds in zip(played.parts, spent, strict=True))
        return replace(played, parts=parts)

    chain = chain_of([(0,)] * 4, [timed(set())], [timed({0, 1, 2, 3})], by_time=True)
    assert [rung.units for rung in chain] == [(0, 1, 2), (0, 1), (0,), ()]
