"""A few kills of the benchmarks checkpoint_kills and trainer_kills: nothing torn is loaded, nothing complete lost."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@contextlib.contextmanager
def imported(name: str) -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # processes import it by its name
    with imported("checkpoint_kills") as module:
        yield module


KILLS = [
    ("save", "one rank", "rectangle", 14, 1, 1),
    ("asynchronous save", "all ranks", "manifest", 3, 0, 2),
    ("load", "all ranks", "read", 4, 1, 3),
]
"""A kill, and the step that is loaded after it."""


@pytest.mark.ranks
@pytest.mark.breadth
@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: f"{kill[0]}, {kill[1]}")
def test_a_kill_leaves_what_was_complete(benchmark: Any, kill: tuple[Any, ...]) -> None:
    *what, step = kill
    left = benchmark.left_by(benchmark.Kill(*what), benchmark.by_step())
    assert left.came
    assert left.problem == ""
    assert left.step == step


@pytest.mark.ranks
@pytest.mark.breadth
def test_a_trainer_goes_on_as_if_it_was_not_killed(benchmark: Any) -> None:
    with imported("trainer_kills") as trainers:
        expected = trainers.uninterrupted(["tp"])
        for who, part, moment, step in (("all ranks", "deletion 2", 0.9, 2), ("one rank", "save 2", 0.5, 2)):
            left = trainers.left_by(trainers.Kill("tp", who, part, moment, 0), expected)
            assert left.came
            assert left.problem == ""
            assert left.step == step
