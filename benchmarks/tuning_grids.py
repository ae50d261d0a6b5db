"""Grids to search on: throughput and memory of every point, known beforehand.

`paper_grid` has the form of the paper's figure (batch size times checkpoint ratio, 13 x 7, 28 points out of memory, the
best at half the layers checkpointed, 30 % above the worst) with made-up numbers; `four_knobs` has 400 points; the
`held_out` ones have random shapes.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slapo_tune.samplers import Point
from slapo_tune.space import Space

__all__ = ["Grid", "four_knobs", "held_out", "measured", "paper_grid"]

Key = tuple[Any, ...]

MEASURED = Path(__file__).parent / "results" / "tuning_grid.json"

ABSENT = "-"
"""In a key, for a symbol that a point does not have."""


@dataclass(frozen=True)
class Grid:
    """Everything that trials would measure.

    Args:
        name: e.g. ``"paper"``.
        symbols: candidates by name.
        value: throughput of each point, by its values.
        needs: bytes of each point.
        memory: bytes that there are.
    """

    name: str
    symbols: Mapping[str, tuple[Any, ...]]
    value: Mapping[Key, float]
    needs: Mapping[Key, int]
    memory: int

    def space(self) -> Space:
        """All of the grid, the points that do not fit among them."""
        paths = [
            [(name, value) for name, value in zip(self.symbols, key, strict=True) if value is not ABSENT]
            for key in self.value
        ]

        def choose(s: Any) -> None:
            left, depth = paths, 0
            while len(left[0]) > depth:
                name = left[0][depth][0]
                value = s.choose(name, dict.fromkeys(path[depth][1] for path in left))
                left, depth = [path for path in left if path[depth] == (name, value)], depth + 1

        return Space(choose)

    def key(self, point: Point) -> Key:
        """The values of a point."""
        return tuple(point.get(name, ABSENT) for name in self.symbols)

    def fitting(self) -> list[Key]:
        """What fits."""
        return [values for values in self.value if self.needs[values] <= self.memory]

    @property
    def best(self) -> float:
        """The best throughput of a point that fits."""
        return max(self.value[values] for values in self.fitting())


def made(
    name: str,
    symbols: Mapping[str, tuple[Any, ...]],
    throughput: Callable[..., float],
    needs: Callable[..., float],
    *,
    without_memory: int,
    noise: float,
    seed: int,
) -> Grid:
    """A grid of two functions, of which so many points do not fit.

    Args:
        name: of the grid.
        symbols: candidates by name.
        throughput: of a point's values.
        needs: relative memory of a point's values.
        without_memory: how many points do not fit.
        noise: relative standard deviation of the throughput.
        seed: of the noise.
    """
    chance = random.Random(f"{name} {seed}")
    keys = list(itertools.product(*symbols.values()))
    value = {key: throughput(*key) * math.exp(chance.gauss(0.0, noise)) for key in keys}
    bytes_of = {key: int(needs(*key) * 2**30) for key in keys}
    order = sorted(bytes_of.values())
    return Grid(name, symbols, value, bytes_of, order[len(order) - 1 - without_memory])


def paper_grid(seed: int = 0) -> Grid:
    """The paper's form: 91 points, 28 of them out of memory."""
    ratios = (1.0, 0.92, 0.84, 0.67, 0.5, 0.34, 0.25)

    def throughput(batch: int, ratio: float) -> float:
        return 40.0 * (1.0 - math.exp(-batch / 55.0)) / (1.0 + 0.33 * ratio) * (1.0 - 0.02 * (batch % 16 != 0))

    def needs(batch: int, ratio: float) -> float:
        return 8.0 + batch * (0.21 - 0.17 * ratio)

    symbols = {"batch": tuple(range(96, 193, 8)), "checkpoint": ratios}
    return made("paper", symbols, throughput, needs, without_memory=28, noise=0.006, seed=seed)


def four_knobs(seed: int = 0) -> Grid:
    """400 points: batch, checkpoint ratio, tensor parallelism, kernel; with interactions, a ridge and 1 % of noise."""

    def throughput(batch: int, ratio: float, tp: int, kernel: str) -> float:
        work = 1.0 + 0.33 * ratio + (0.18 if kernel == "eager" else 0.02 * batch / 16)
        talk = 0.10 * math.log2(tp) * (1.0 + 0.3 * ratio)
        filled = 1.0 - math.exp(-(batch * tp) / 11.0)
        return 100.0 * filled / (work + talk) * (0.93 if kernel == "flash" and tp == 8 else 1.0)

    def needs(batch: int, ratio: float, tp: int, kernel: str) -> float:
        saved = (1.0 - 0.8 * ratio) * (1.6 if kernel == "eager" else 1.0)
        return 12.0 / tp + batch * saved * (0.35 + 0.65 / tp)

    symbols = {
        "batch": (2, 4, 6, 8, 10, 12, 16, 20, 24, 32),
        "checkpoint": (0.0, 0.25, 0.5, 0.75, 1.0),
        "tp": (1, 2, 4, 8),
        "kernel": ("eager", "flash"),
    }
    return made("four knobs", symbols, throughput, needs, without_memory=120, noise=0.01, seed=seed)


def measured(file: Path = MEASURED) -> Grid:
    """The grid that `tuning_grid.py` measured: the bytes are those that were predicted, a quarter of it does not fit.

    Args:
        file: as it is written there.
    """
    record = json.loads(file.read_text())
    names = record["symbols"]
    value, needs = {}, {}
    for trial in record["trials"]:
        key = tuple(trial["point"].get(name, ABSENT) for name in names)
        if trial["status"] == "ok":
            value[key], needs[key] = trial["value"], int(trial["predicted"]["memory"])
    order = sorted(needs.values())
    return Grid("measured", {name: tuple(names[name]) for name in names}, value, needs, order[len(order) * 3 // 4])


def held_out(count: int = 20, prefix: str = "held out") -> Iterator[Grid]:
    """Random grids: two to four symbols, 48 to 500 points, other shapes, interactions, local optima and noise.

    Args:
        count: how many.
        prefix: of their names; another one gives other grids.
    """
    for number in range(count):
        yield _random_grid(number, prefix)


def _random_grid(number: int, prefix: str) -> Grid:
    chance = random.Random(f"{prefix} {number}")
    size = 0
    while not 48 <= size <= 500:
        sizes = [chance.randint(2, 14) for _ in range(chance.choice((2, 3, 4)))]
        size = math.prod(sizes)
    effects = [_effect(chance, length) for length in sizes]
    pairs = {pair: chance.uniform(-0.12, 0.12) for pair in itertools.combinations(range(len(sizes)), 2)}
    slopes = [chance.choice((-1, 1)) * chance.uniform(0.2, 1.5) for _ in sizes]
    bump = [chance.random() for _ in sizes]
    height = chance.uniform(0.0, 0.08)

    def places(*indices: int) -> list[float]:
        return [index / (length - 1) for index, length in zip(indices, sizes, strict=True)]

    def throughput(*indices: int) -> float:
        at = places(*indices)
        log = sum(effect[index] for effect, index in zip(effects, indices, strict=True))
        log += sum(weight * (at[a] - 0.5) * (at[b] - 0.5) for (a, b), weight in pairs.items())
        log += height * math.exp(-8.0 * sum((x - y) ** 2 for x, y in zip(at, bump, strict=True)))
        return 100.0 * math.exp(log)

    def needs(*indices: int) -> float:
        return 4.0 + 20.0 * math.exp(sum(slope * x for slope, x in zip(slopes, places(*indices), strict=True)))

    symbols = {f"x{place}": tuple(range(length)) for place, length in enumerate(sizes)}
    return made(
        f"{prefix} {number}",
        symbols,
        throughput,
        needs,
        without_memory=int(size * chance.uniform(0.1, 0.5)),
        noise=chance.choice((0.0, 0.005, 0.01, 0.015)),
        seed=number,
    )


def _effect(chance: random.Random, length: int) -> list[float]:
    """The log of what a symbol does to throughput: rising, falling, with an optimum inside, or without an order."""
    height, form = chance.uniform(0.05, 0.5), chance.choice(("saturating", "falling", "inside", "any"))
    at = [index / (length - 1) for index in range(length)]
    if form == "saturating":
        return [height * (1.0 - math.exp(-3.0 * x)) for x in at]
    if form == "falling":
        return [-height * x for x in at]
    if form == "inside":
        middle = chance.uniform(0.2, 0.8)
        return [-2.0 * height * (x - middle) ** 2 for x in at]
    return [chance.uniform(-height / 2, height / 2) for _ in at] if length <= 4 else [height * x for x in at]
