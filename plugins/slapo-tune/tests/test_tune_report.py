"""Tables and pictures: what they say is what the trials say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from slapo_core import ArgumentError
from slapo_tune.plots import Plane, write_picture
from slapo_tune.report import (
    StudyReport,
    agreement,
    best_trial,
    duration,
    number,
    point_words,
    rank_correlation,
    search_steps,
)
from slapo_tune.samplers import STATUSES
from tests.messages import Messages

from .searched import POINTS, TRIALS

FOUND = StudyReport(POINTS, TRIALS, refused=[({"batch": 1}, "too small"), ({"batch": 3}, "too small")])


def test_best_trial_is_the_first_ok_with_the_largest_value() -> None:
    best = best_trial(TRIALS)
    assert best is not None
    assert (best.number, best.value) == (1, 30.0)
    assert best_trial([trial for trial in TRIALS if trial.status != "ok"]) is None


def test_search_steps_count_started_trials_and_all_seconds() -> None:
    steps = search_steps(TRIALS)
    assert [step.trial.number for step in steps] == [0, 1, 4, 5, 6, 8, 9, 10]
    assert [step.best for step in steps] == [10.0] + [30.0] * 7
    assert steps[-1].seconds == pytest.approx(8 * 4.0 + 3 * 0.1)


def test_reasons_that_differ_in_numbers_count_as_one() -> None:
    assert FOUND.statuses == dict(zip(STATUSES, (4, 1, 1, 1, 1, 1, 2), strict=True))
    results = [(one.status, one.count, one.reason) for one in FOUND.reasons]
    assert results == [
        ("oom", 1, "rank 1 ran out of memory"),
        ("timeout", 1, "not finished within 300 s"),
        ("crash", 1, "rank 0 was killed"),
        ("wrong", 1, "loss is nan"),
        ("refused", 2, "too small"),
        ("refused", 1, "4 heads do not divide by 3"),
        ("over_memory", 2, "needs 3.2GiB of 3GiB"),
    ]


def test_predictions_are_compared_if_both_numbers_exist() -> None:
    memory, time = agreement(TRIALS, "memory"), agreement(TRIALS, "time")
    assert memory is not None
    assert time is not None
    assert (memory.count, memory.ratio, memory.lowest, memory.highest) == (4, 1.0, 0.9, 1.5)
    assert memory.correlation == pytest.approx(0.8)  # 1000 2700 3000 4000 in another order: one swap of neighbors
    assert time.ratio == 0.5
    assert agreement(TRIALS[2:6], "memory") is None


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 400], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 2, 3], [1, 3, 2, 4], 0.9486832980505138),  # scipy.stats.spearmanr
        ([1, 2], [1, 2], None),
        ([1, 2, 3], [5, 5, 5], None),
    ],
)
def test_rank_correlation_is_spearmans(first: list[float], second: list[float], expected: float | None) -> None:
    got = rank_correlation(first, second)
    assert got == (None if expected is None else pytest.approx(expected))


def test_each_candidate_has_its_best_trial() -> None:
    rows = {(one.symbol, one.candidate): one for one in FOUND.effects}
    assert list(rows) == [
        *(("batch", batch) for batch in (2, 4, 8)),
        *(("checkpoint", ratio) for ratio in (0.0, 0.5, 1.0)),
        ("kernel", "plain"),
        ("kernel", "flash"),
    ]
    four = rows["batch", 4]
    assert (four.points, four.tried, four.ok, four.share) == (6, 4, 2, 1.0)
    half = rows["checkpoint", 0.5]
    assert (half.tried, half.ok, half.best, half.share) == (2, 0, None, None)


def test_report_as_json_equals_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(json.dumps(FOUND.as_json()))
    assert answer["best"]["point"] == {"batch": 2, "checkpoint": 0.0, "kernel": "flash"}
    assert answer["space"] == {"points": 16, "refused": 2, "untried": 5}
    assert sum(answer["statuses"].values()) == len(answer["trials"]) == 11
    FOUND.print()
    printed = capsys.readouterr().out
    assert printed.splitlines()[:2] == [
        "16 points (2 more refused by the space); 8 started, 3 pruned, 5 not tried; 32 s in trials",
        "best  30 samples/s  batch=2 checkpoint=0 kernel=flash  (trial 1)",
    ]
    for words in ("needs 3.2GiB of 3GiB", "memory  4       1.000   0.900   1.500    0.800", "too small"):
        assert words in printed


def test_report_of_a_search_without_an_ok_trial(capsys: pytest.CaptureFixture[str]) -> None:
    StudyReport(POINTS, TRIALS[2:6]).print()
    assert "no trial was ok" in capsys.readouterr().out
    StudyReport([], []).print()


def test_plane_has_the_outline_of_the_space_and_the_best_of_each_cell() -> None:
    plane = Plane(POINTS, TRIALS)
    assert (plane.symbols, plane.others) == (("batch", "checkpoint"), ("kernel",))
    # batch 2, 4, 8 is not evenly spaced: its candidates stand one after the other
    assert plane.edge() == [(0.0, 0.0), (1.0, 0.0), (2.0, 0.5), (2.0, 1.0), (1.0, 1.0), (0.0, 1.0)]
    cell = plane.cells[0.0, 0.0]
    assert (cell.status, cell.value) == ("ok", 30.0)
    assert plane.cells[0.0, 0.5].status == "over_memory"
    assert plane.cells[2.0, 0.5].status == ""


def test_points_without_a_symbol_come_first_on_its_axis() -> None:
    points = [{"tp": 1}, {"tp": 2, "overlap": 1}, {"tp": 2, "overlap": 2}]
    assert [Plane(points, []).at(point) for point in points] == [(1.0, 0.0), (2.0, 1.0), (2.0, 2.0)]


def test_plot_is_written(tmp_path: Path) -> None:
    file = tmp_path / "plots" / "search.png"
    assert write_picture(POINTS, TRIALS, file, axes=("kernel", "batch"), title="study.py") == file
    complete = file.read_bytes()
    assert complete.startswith(b"\x89PNG")
    line = [{"batch": batch} for batch in (1, 2)]  # one symbol spans no plane
    assert len(write_picture(line, [], file).read_bytes()) < len(complete)


def test_plot_without_matplotlib_or_with_unknown_symbols_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: Messages
) -> None:
    with pytest.raises(ArgumentError) as caught:
        write_picture(POINTS, TRIALS, tmp_path / "search.png", axes=("batch", "tp"))
    message(caught, "got batch, tp", "--axes batch,checkpoint")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ArgumentError) as caught:
        write_picture(POINTS, TRIALS, tmp_path / "search.png")
    message(caught, "matplotlib", "pip install 'slapo-tune[draw]'")
    assert list(tmp_path.iterdir()) == []


def test_formatting_of_numbers_and_durations() -> None:
    assert [number(value) for value in (312.44, 0.012346, 123456.0)] == ["312.4", "0.01235", "123,456"]
    assert [duration(value) for value in (8.04, 59.6, 200, 7500)] == ["8.0 s", "1 min 0 s", "3 min 20 s", "2 h 5 min"]
    assert point_words({"batch": 4, "ratio": 0.5, "kernel": "flash"}) == "batch=4 ratio=0.5 kernel=flash"
