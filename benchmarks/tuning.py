"""How many trials a search takes: the samplers of slapo-tune on grids whose values are known beforehand.

    python benchmarks/tuning.py               # the table, and results/tuning_search.json
    python benchmarks/tuning.py --seeds 5     # a quick look

A grid answers in place of a trial. What does not fit by the estimate is not started, and is no trial. Beside the
samplers stand the paper's plain coordinate descent (one start, steps by one candidate), random points and Optuna's TPE.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from report import save
from tuning_grids import MEASURED, Grid, four_knobs, held_out, measured, paper_grid

from slapo_core import Sampler
from slapo_tune.samplers import Point, SearchSpace, Trial
from slapo_tune.samplers.coordinate import Coordinate
from slapo_tune.samplers.frontier import Frontier
from slapo_tune.samplers.optuna import OptunaTpe
from slapo_tune.samplers.program import ReplayedSearch, candidates_of, point_with, replay_program, sample_point
from slapo_tune.samplers.random import Random
from slapo_tune.space import Space

GOAL = 0.97


class Plain(Sampler):
    """The paper's baseline: randomised coordinate descent from one start, by one candidate of one symbol at a time."""

    name = "plain"

    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        return replay_program(_plain, space, history, seed)


def _plain(ask: ReplayedSearch) -> None:
    point = sample_point(ask)
    moves: list[tuple[str, int]] | None = None
    while point is not None and moves != []:
        if moves is None:
            moves = [(symbol, way) for symbol in point for way in (1, -1)]
            ask.random.shuffle(moves)
        symbol, way = moves.pop()
        values = candidates_of(ask.space, point)[symbol]
        index = values.index(point[symbol]) + way
        other = point_with(ask.space, {**point, symbol: values[index]}) if 0 <= index < len(values) else None
        if other is not None and ask.fits(other) and ask.value(other) > ask.value(point):
            point, moves = other, None


class View:
    """A grid as a sampler sees it; ``error`` is the relative standard deviation of what is predicted."""

    def __init__(self, grid: Grid, space: Space, error: float, seed: int) -> None:
        self.grid, self.space, self.memory = grid, space, grid.memory
        self.error, self.seed = error, seed
        self.estimated: set[Any] = set()

    def points(self) -> Iterable[Point]:
        return self.space.points()

    def draw(self, pick: Callable[[str, tuple[Any, ...]], int]) -> Point | None:
        return self.space.draw(pick)

    def predicted_memory(self, point: Point) -> int:
        key = self.grid.key(point)
        self.estimated.add(key)
        off = random.Random(f"{key} {self.seed}").gauss(1.0, self.error) if self.error else 1.0
        return int(self.grid.needs[key] * off)


def searched(sampler: Sampler, view: View, seed: int, most: int) -> dict[str, Any]:
    """One search: the best so far after each trial, and how many trials did not fit after all."""
    grid, history, best = view.grid, [], [0.0]
    without_memory = 0
    while len(best) <= most and (point := sampler.suggest(view, history, seed)) is not None:
        key, predicted = grid.key(point), view.predicted_memory(point)
        told: dict[str, Any] = {"predicted": {"memory": predicted}}
        if predicted > grid.memory:
            history.append(Trial(len(history), point, "over_memory", **told))
            continue
        if grid.needs[key] > grid.memory:
            without_memory += 1
            history.append(Trial(len(history), point, "oom", **told))
            best.append(best[-1])
            continue
        told["measured"] = {"memory": grid.needs[key]}
        history.append(Trial(len(history), point, "ok", grid.value[key], **told))
        best.append(max(best[-1], grid.value[key]))
    return {"best": [value / grid.best for value in best[1:]], "oom": without_memory, "estimates": len(view.estimated)}


def budget(grid: Grid) -> int:
    """Trials that a search may take: 17 of 91, and 8 % of larger grids."""
    return max(17, int(0.08 * len(grid.value)))


def row(sampler: Sampler, grid: Grid, seeds: int, error: float = 0.0, most: int | None = None) -> dict[str, Any]:
    """A line of the table: how often the goal was reached within the budget, and after how many trials."""
    space, allowed = grid.space(), budget(grid)
    before = time.process_time()
    runs = [searched(sampler, View(grid, space, error, seed), seed, most or 10**6) for seed in range(seeds)]
    reached = [next((number for number, share in enumerate(run["best"], 1) if share >= GOAL), None) for run in runs]
    trials = [len(run["best"]) for run in runs]
    found = [number for number in reached if number is not None]
    return {
        "grid": grid.name,
        "points": len(grid.value),
        "without_memory": len(grid.value) - len(grid.fitting()),
        "sampler": sampler.name,
        "prediction_error": error,
        "seeds": seeds,
        "budget": allowed,
        "reached_in_budget": sum(number <= allowed for number in found) / seeds,
        "trials_to_goal_median": statistics.median(found) if found else None,
        "trials_to_goal_max": max(found) if len(found) == seeds else None,
        "worst_at_budget": round(min(run["best"][: min(allowed, len(run["best"]))][-1] for run in runs), 4),
        "worst_at_end": round(min(run["best"][-1] for run in runs), 4),
        "trials_at_end_median": statistics.median(trials),
        "trials_at_end_max": max(trials),
        "over_memory_started": sum(run["oom"] for run in runs),
        "estimates_max": max(run["estimates"] for run in runs),
        "milliseconds_a_proposal": round(1000 * (time.process_time() - before) / max(1, sum(trials)), 1),
    }


def shown(line: dict[str, Any]) -> str:
    goal = f"{line['trials_to_goal_median']} / {line['trials_to_goal_max'] or 'not always'}"
    ends = f"{line['trials_at_end_median']} / {line['trials_at_end_max']}"
    return (
        f"{line['grid']:<12} {line['points']:>4} {line['sampler']:<11} {line['budget']:>6} "
        f"{100 * line['reached_in_budget']:>6.0f} % {goal:>18} {line['worst_at_budget']:>9.3f} {ends:>12} "
        f"{line['over_memory_started']:>4} {line['estimates_max']:>5}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=50, help="of each search; default: %(default)s")
    parser.add_argument("--held-out", type=int, default=20, help="random grids; default: %(default)s")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    recorded = [paper_grid(), four_knobs(), *([measured()] if MEASURED.exists() else [])]
    ours: list[Sampler] = [Frontier(), Coordinate()]
    baselines: list[Sampler] = [Plain(), Random(), OptunaTpe()]
    lines = []
    print("grid       points sampler     budget reached  to 97 % med / max  at budget  end med/max  oom estim.")
    for grid in recorded:
        for sampler in (*ours, *baselines):
            most = None if sampler in (*ours, baselines[0]) else budget(grid)
            lines.append(row(sampler, grid, options.seeds, most=most))
            print(shown(lines[-1]), flush=True)
    for grid in recorded:
        lines.append(row(ours[0], grid, options.seeds, error=0.01))
        print(shown(lines[-1]), " memory predicted with 1 % of error", flush=True)
    for grid in held_out(options.held_out):
        for sampler in (*ours, *baselines[:2]):
            lines.append(row(sampler, grid, max(1, options.seeds // 5), most=None if sampler in ours else budget(grid)))
            print(shown(lines[-1]), flush=True)
    save("tuning_search", lines, goal=f"{GOAL:.0%} of the best", question="how many trials a search takes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
