"""How many blocks `fit` checkpoints, on peaks made up of numbers: against every number."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from slapo_estimate.fit import fewest


def falling(draw: random.Random, size: int, rising: int) -> list[int]:
    """Peaks by number of blocks: they fall, and with the last ones they rise."""
    peaks = [1000]
    for number in range(size):
        peaks.append(peaks[-1] + (draw.randint(-60, -1) if number < size - rising else draw.randint(1, 30)))
    return peaks


def smallest(peaks: Sequence[int], target: int) -> int | None:
    return next((number for number, peak in enumerate(peaks) if peak <= target), None)


@pytest.mark.parametrize("rising", [0, 1, 3])
def test_fewest_finds_the_smallest_number_for_each_target(rising: int) -> None:
    draw = random.Random(rising)
    for size in (1, 2, 3, 7, 12, 24, 33):
        peaks, before = falling(draw, size, rising if size > rising else 0), size
        for target in range(min(peaks) - 2, 1005, 3):
            asked: list[int] = []

            def peaks_of(counts: Sequence[int], peaks: list[int] = peaks, asked: list[int] = asked) -> list[int]:
                asked.append(counts[0])
                return [peaks[counts[0]]]

            found, expected = fewest([size], peaks_of, target), smallest(peaks, target)
            assert found == (None if expected is None else (expected,))
            assert len(asked) <= 4 + rising + size.bit_length()
            if found is not None:
                assert found[0] <= before  # with more memory never more
                before = found[0]


def test_pipeline_stages_share_estimates_and_have_separate_numbers() -> None:
    draw = random.Random(0)
    for sizes in itertools.product((0, 1, 4, 12), repeat=2):
        peaks = [falling(draw, size, 1 if size > 1 else 0) for size in sizes]
        asked = 0

        def peaks_of(counts: Sequence[int], peaks: list[list[int]] = peaks) -> list[int]:
            nonlocal asked
            asked += 1
            return [own[count] for own, count in zip(peaks, counts, strict=True)]

        for target in (1000, 990, 950, 900, 700):
            asked = 0
            expected = [smallest(own, target) for own in peaks]
            assert fewest(sizes, peaks_of, target) == (None if None in expected else tuple(expected))
            assert asked <= 9
