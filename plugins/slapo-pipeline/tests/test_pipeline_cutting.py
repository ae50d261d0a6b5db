"""The cuts of ``pipeline_split(stages=N)`` are the best there are: held against all others."""

from __future__ import annotations

import itertools
import random

import pytest

from slapo_pipeline.balance import best_cuts, segment_costs


def _pieces(costs, cuts):
    ends = [0, *cuts, len(costs)]
    return [costs[start][end] for start, end in itertools.pairwise(ends)]


def _best(costs, stages):
    """The least possible (largest piece, sum of squares), by looking at every way to cut."""
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    pieces = [_pieces(costs, cuts) for cuts in every]
    return min((max(each), sum(piece * piece for piece in each)) for each in pieces)


def test_the_cut_is_the_best_of_all_on_up_to_twelve_blocks():
    random.seed(0)
    compared = 0
    for count in range(1, 13):
        for stages in range(1, count + 1):
            for spread in (1, 3, 1000):
                blocks = [{index: random.randint(1, spread)} for index in range(count)]
                before, after = {"before": random.randint(0, 3 * spread)}, {"after": random.randint(0, 3 * spread)}
                costs = segment_costs(before, blocks, after)
                cuts = best_cuts(costs, stages)
                found = _pieces(costs, cuts)
                assert len(cuts) == stages - 1
                assert (max(found), sum(piece * piece for piece in found)) == _best(costs, stages)
                compared += 1
    assert compared == 234


def test_a_parameter_shared_by_blocks_of_a_stage_counts_once():
    random.seed(1)
    for _ in range(40):
        sizes = {key: random.randint(1, 100) for key in "abcdef"}
        blocks = [{key: sizes[key] for key in random.sample("abcdef", 2)} for _ in range(8)]
        before, after = {"a": sizes["a"]}, {"a": sizes["a"], "tail": 5}
        costs = segment_costs(before, blocks, after)
        held = set(before) | set(blocks[0]) | set(blocks[1])
        assert costs[0][2] == sum(sizes[key] for key in held)
        assert costs[7][8] == sum({**blocks[7], **after}.values())
        found = _pieces(costs, best_cuts(costs, 3))
        assert (max(found), sum(piece * piece for piece in found)) == _best(costs, 3)


@pytest.mark.parametrize(
    ("before", "blocks", "after", "stages", "expected"),
    [
        (0, [1] * 12, 0, 4, (3, 6, 9)),
        (0, [1] * 12, 0, 1, ()),
        (0, [5, 1, 9], 0, 3, (1, 2)),
        (3, [1] * 6, 3, 3, (1, 5)),  # embedding and head take the place of blocks
        (0, [1] * 12, 100, 4, (3, 7, 11)),  # the head decides the largest stage, and the others are balanced still
        (50, [1] * 5, 0, 2, (1,)),
        (0, [1, 1, 50, 1, 1], 0, 3, (2, 3)),
    ],
)
def test_odd_cases(before, blocks, after, stages, expected):
    shares = [{index: cost} for index, cost in enumerate(blocks)]
    assert best_cuts(segment_costs({"before": before}, shares, {"after": after}), stages) == expected
