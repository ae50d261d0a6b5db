"""Samplers: what they propose, on spaces of any form and histories with every status."""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from slapo_core import Sampler
from slapo_core.plugins import current_registry
from slapo_tune.cases import ListedSpace
from slapo_tune.samplers import STATUSES, Point, Trial
from slapo_tune.samplers.coordinate import Coordinate
from slapo_tune.samplers.exhaustive import Exhaustive
from slapo_tune.samplers.frontier import Frontier
from slapo_tune.samplers.optuna import OptunaMissingError, OptunaRandom, OptunaTpe
from slapo_tune.samplers.program import ReplayedSearch, move
from slapo_tune.samplers.random import Random
from slapo_tune.space import Space
from tests.messages import Messages

SAMPLERS: list[type[Sampler]] = [Coordinate, Exhaustive, Frontier, OptunaRandom, OptunaTpe, Random]


class View(ListedSpace):
    """A space of a function, for samplers."""

    def __init__(self, space: Space, needs: Any = None, memory: int | None = None) -> None:
        super().__init__(list(space.points()), needs, memory)
        object.__setattr__(self, "draw", space.draw)


def polygon(batches: int, ratios: int, kinds: int) -> Space:
    def space(s: Any) -> None:
        batch = s.choose("batch", range(1, batches + 1))
        ratio = s.choose("ratio", range(min(ratios, batch)))
        s.require(batch != 2, "2 is refused")
        if (batch + ratio) % 2:
            s.choose("kernel", ["none", "one", "two"][:kinds])

    return Space(space)


def needs(point: Point) -> int | None:
    return None if point["batch"] == 4 else int(100 * point["batch"] / (1 + point["ratio"]))


def finished(point: Point, number: int, chance: random.Random, view: View) -> Trial:
    predicted = view.predicted_memory(point)
    told = {} if predicted is None else {"memory": predicted}
    status = chance.choice([*(status for status in STATUSES if status != "over_memory"), "ok", "ok", "ok"])
    if predicted is not None and view.memory is not None and predicted > view.memory:
        status = "over_memory"
    value = chance.uniform(-1.0, 3.0) if status == "ok" else None
    return Trial(number, point, status, value, predicted=told, measured=told if value else {})


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.sampled_from([None, 150, 10**6]), st.integers(0, 99))
def test_proposals_are_new_points_and_searches_resume_from_any_prefix(
    batches: int, ratios: int, kinds: int, memory: int | None, seed: int
) -> None:
    view = View(polygon(batches, ratios, kinds), needs if memory else None, memory)
    for cls in SAMPLERS:
        chance, history, proposals = random.Random(seed), [], []
        while (point := cls().suggest(view, history, seed)) is not None:
            assert point in view.listed
            assert point not in [trial.point for trial in history]
            proposals.append(point)
            history.append(finished(point, len(history), chance, view))
        for cut in {0, len(history) // 2, len(history)}:
            again = cls().suggest(view, tuple(history[:cut]), seed)
            assert again == (proposals[cut] if cut < len(proposals) else None), cls.name
        if cls is Exhaustive:
            assert proposals == list(view.listed)
        elif memory is not None:
            assert not [trial for trial in history if trial.status == "over_memory"], cls.name


def paper(batch: int, ratio: int) -> float:
    return (1.0 - math.exp(-batch / 5.0)) / (1.0 + 0.05 * ratio)


def plane(limit: int) -> View:
    def space(s: Any) -> None:
        s.choose("batch", range(1, 14))
        s.choose("ratio", range(7))

    return View(Space(space), needed, limit * GIB)


GIB = 2**30


def needed(point: Point) -> int:
    return int(point["batch"] * (10 - point["ratio"])) * GIB


def search(
    cls: type[Sampler], view: View, value: Any, *, wrong: float = 1.0, seed: int = 0, is_measured: bool = True
) -> list[Trial]:
    history: list[Trial] = []
    while (point := cls().suggest(view, history, seed)) is not None:
        told = {"memory": view.predicted_memory(point) or 0}
        fits = view.memory is None or told["memory"] * wrong <= view.memory
        result = ("ok", value(**point)) if fits else ("oom", None)
        measured = {"memory": told["memory"] * wrong} if fits and is_measured else {}
        history.append(Trial(len(history), point, *result, predicted=told, measured=measured))
    return history


def best(history: list[Trial]) -> float:
    return max(trial.value for trial in history if trial.value is not None)


@pytest.mark.parametrize("cls", [Frontier, Coordinate])
def test_best_point_is_found_on_the_edge_and_off_it(cls: type[Sampler]) -> None:
    def inside(batch: int, ratio: int) -> float:
        return 10.0 - (batch - 4) ** 2 * 0.1 - (ratio - 4) ** 2 * 0.2

    view = plane(60)
    fitting = [point for point in view.listed if (view.predicted_memory(point) or 0) <= 60 * GIB]
    for value in (paper, inside):
        top = max(value(**point) for point in fitting)
        for seed in range(4):
            history = search(cls, view, value, seed=seed)
            assert best(history) >= 0.97 * top
            assert len(history) < len(fitting) / 2
            assert all(trial.status == "ok" for trial in history)


@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize("cls", [Frontier, Coordinate])
def test_memory_beyond_the_estimate_is_learned(cls: type[Sampler], is_measured: bool) -> None:
    """All trials need 20 % more than predicted: what fitted tells it, or else each that did not."""
    for seed in range(4):
        history = search(cls, plane(60), paper, wrong=1.2, seed=seed, is_measured=is_measured)
        failed = [trial for trial in history if trial.status == "oom"]
        for trial in failed:
            assert all(other.predicted["memory"] < trial.predicted["memory"] for other in history[trial.number + 1 :])
        assert len(failed) <= (1 if is_measured else 4)
        assert best(history) > 0.9 * max(
            paper(**point) for point in plane(60).listed if needed(point) * 1.2 <= 60 * GIB
        )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3.0, 0.0])
def test_search_ends_with_any_values_of_trials(value: float) -> None:
    for cls in (Frontier, Coordinate, OptunaTpe):
        history = [Trial(number, point, "ok", value) for number, point in enumerate(plane(60).listed[:10])]
        assert cls().suggest(plane(60), history, 0) not in [trial.point for trial in history]
    history = search(Frontier, plane(60), lambda batch, ratio: value)
    assert 0 < len(history) <= 62


def test_oom_below_fitting_predictions_is_an_outlier() -> None:
    view = plane(60)
    odd = Trial(0, {"batch": 1, "ratio": 6}, "oom", predicted={"memory": 4 * GIB})
    fine = Trial(1, {"batch": 6, "ratio": 0}, "ok", 1.0, predicted={"memory": 60 * GIB})
    assert Random().suggest(view, [odd], 0) is None
    assert Random().suggest(view, [odd, fine], 0) is not None


def test_move_follows_the_edge_of_memory() -> None:
    ask = ReplayedSearch(plane(60), [], 0)
    assert move(ask, {"batch": 6, "ratio": 0}, "batch", 1) == {"batch": 7, "ratio": 2}
    assert move(ask, {"batch": 7, "ratio": 2}, "ratio", -1) == {"batch": 6, "ratio": 1}
    assert move(ask, {"batch": 13, "ratio": 6}, "batch", 1) is None


def test_search_in_a_space_of_a_billion_points_evaluates_few() -> None:
    def space(s: Any) -> None:
        for symbol in range(9):
            s.choose(f"x{symbol}", range(10))

    complete = Space(space)
    view = View(Space(lambda s: None))
    object.__setattr__(view, "draw", complete.draw)
    object.__setattr__(view, "points", complete.points)
    for cls in (Frontier, Coordinate, Random, OptunaTpe):
        history: list[Trial] = []
        while len(history) < 12 and (point := cls().suggest(view, history, 0)) is not None:
            history.append(Trial(len(history), point, "ok", 1.0 + point["x0"]))
        assert len(history) == 12


def test_missing_optuna_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch, message: Messages) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(OptunaMissingError) as caught:
        OptunaTpe().suggest(plane(60), [], 0)
    message(caught, "'optuna.tpe'", 'pip install "slapo-tune[optuna]"')


def test_samplers_are_installed_under_their_names() -> None:
    names = current_registry().names("samplers")
    assert {cls.name for cls in SAMPLERS} <= set(names)
    assert all(current_registry().load(cls.name, "samplers") is cls for cls in SAMPLERS)
